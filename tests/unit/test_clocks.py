"""Decisions between processes do not depend on the time of day."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import mayfly_cli
import mayfly_protocol
import mayfly_reaper
import mayfly_server
import mayfly_worker

WALL_CLOCKS = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}
WALL_CLOCKS |= {("date", "today"), ("datetime", "today")}
FOR_PEOPLE = {
    "mayfly_reaper/crash_log.py": "when a worker was lost, in its autopsy",
    "mayfly_reaper/machine/oom.py": "how old a file of this machine is",
    "mayfly_server/app.py": "since when a model is served, in /v1/models",
    "mayfly_server/api/answer.py": "when an answer was made",
    "mayfly_server/api/openai/chat_prompt.py": "the day, for the template",
    "mayfly_server/api/anthropic/messages_prompt.py": "the day, for the template",
    "mayfly_server/api/responses/responses_prompt.py": "the day, for the template",
    "mayfly_worker/text/chat_template.py": "the day, for whoever renders without a front end",
}
"""The modules that look at a wall clock, and what for."""


def reading_a_wall_clock() -> Iterator[str]:
    for package in (mayfly_protocol, mayfly_reaper, mayfly_server, mayfly_cli, mayfly_worker):
        folder = Path(inspect.getfile(package)).parent
        for path in sorted(folder.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
                    continue
                if (node.value.id, node.attr) in WALL_CLOCKS:
                    yield path.relative_to(folder.parent).as_posix()


def test_wall_clocks_are_read_for_people_alone() -> None:
    """Decisions use the monotonic clock of one process."""
    found = {path for path in reading_a_wall_clock() if not path.startswith("mayfly_cli/")}
    assert found == FOR_PEOPLE.keys()
