"""Codex CLI, as released, through whole sessions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.agents import (
    LARGE,
    NOTES,
    POEM,
    PRINT,
    TEMPLATES,
    Output,
    Sessions,
    call,
    killed,
    printing,
    refusals,
)
from support.models.scripted import ScriptedReply

pytestmark = [pytest.mark.agents, pytest.mark.timeout(600)]

PATCH = (
    "*** Begin Patch\n*** Add File: poem.txt\n"
    + "".join(f"+{line}\n" for line in POEM.splitlines())
    + "*** Update File: notes.txt\n@@\n-colour: red\n+colour: blue\n*** End Patch\n"
)
SCRIPT = f"await tools.apply_patch({json.dumps(PATCH)}); text(`patched: ${{40 + 5}}`);"
KNOWN = ("gpt-5.5", "gpt-6.2-sol")
"""Names of models with other tools: `apply_patch` with a grammar, and `exec` with scripts that call
all others."""
PROGRAM = "@openai/codex/bin/codex.js"
SMALL = 32_000
SUMMARY = "Numbers were printed. The summary ends."


def replies(work: Path) -> list[ScriptedReply]:
    """Returns the model's replies in a session whose files lie in ``work``."""
    listing = call("exec_command", cmd="ls; echo listed: $((40 + 2))")
    return [
        ScriptedReply(
            "[the notes]", f"I look.\n{call('exec_command', cmd='cat notes.txt')}\n{listing}"
        ),
        ScriptedReply(
            "listed: 42",
            call("exec_command", cmd=f"apply_patch <<'EOF'\n{PATCH}EOF"),
            faults=killed(at=60),
        ),
        ScriptedReply("M notes.txt", "The notes say blue now."),
        ScriptedReply("patched: 45", "The notes say blue now."),
        ScriptedReply(
            "[the picture]",
            call("view_image", path=f"{work}/red.png")
            + "\n"
            + call("exec_command", cmd="echo seen: $((40 + 3))"),
        ),
        ScriptedReply("seen: 43", "There was a picture."),
        ScriptedReply("[goodbye]", "Goodbye."),
        ScriptedReply("[gpt-5.5]", call("apply_patch", input=PATCH), faults=killed(at=60)),
        ScriptedReply("[gpt-6.2-sol]", call("functions__exec", input=SCRIPT), faults=killed(at=60)),
        *printing(call("exec_command", cmd=PRINT)),
        ScriptedReply("CONTEXT CHECKPOINT COMPACTION", SUMMARY),
    ]


class Codex(Sessions):
    def turn(self, model: str, prompt: str, *options: str, status: int = 0) -> Output:
        client = self.clients[model]
        (client.home / ".codex").mkdir(exist_ok=True)
        (client.home / ".codex" / "config.toml").write_text(
            f"""\
model = "{model}"
model_provider = "mayfly"
model_context_window = {SMALL if model == "small" else LARGE}
check_for_update_on_startup = false
sandbox_mode = "danger-full-access"

[model_providers.mayfly]
name = "Mayfly"
base_url = "{self.server.url}/v1"
wire_api = "responses"
"""
        )
        return client.run(
            client.program(PROGRAM),
            *("exec", *options, "--json", "--skip-git-repo-check", prompt),
            status=status,
        )


def items(output: Output) -> list[dict[str, Any]]:
    return [event["item"] for event in output.of_type("item.completed")]


def said(output: Output) -> str:
    """Returns the last message of a turn."""
    return str([item["text"] for item in items(output) if item["type"] == "agent_message"][-1])


@pytest.fixture(scope="module")
def sessions(modules: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Codex]:
    with Codex.begun(tmp_path_factory.mktemp("codex"), modules, replies, SMALL, KNOWN) as sessions:
        yield sessions


@pytest.mark.parametrize("template", TEMPLATES)
def test_session(sessions: Codex, template: str) -> None:
    """Three turns: two parallel calls, a patch in whose middle the worker is killed; then a
    picture; then words alone."""
    before = refusals(sessions.server)
    work = sessions.clients[template].work

    first = sessions.turn(template, "[the notes] Make them blue.")
    assert said(first) == "The notes say blue now."
    assert (work / "poem.txt").read_text() == POEM
    assert (work / "notes.txt").read_text() == NOTES.replace("red", "blue")
    assert sessions.losses(template) == 1

    second = sessions.turn(template, "[the picture] Look.", "resume", "--last")
    assert said(second) == "There was a picture."

    third = sessions.turn(template, "[goodbye]", "resume", "--last")
    assert said(third) == "Goodbye."
    assert refusals(sessions.server) == before


@pytest.mark.parametrize("name", KNOWN)
def test_model_that_is_named_as_one_of_openais(sessions: Codex, name: str) -> None:
    """The client declares other tools to a model whose name it knows."""
    before = refusals(sessions.server)
    work = sessions.clients[name].work
    assert said(sessions.turn(name, f"[{name}] Make them blue.")) == "The notes say blue now."
    assert (work / "poem.txt").read_text() == POEM
    assert (work / "notes.txt").read_text() == NOTES.replace("red", "blue")
    assert sessions.losses(name) == 1
    assert refusals(sessions.server) == before


def test_compaction(sessions: Codex) -> None:
    """A session that comes near the end of the context is summarized, and goes on."""
    whole = sessions.turn("small", "[numbers] Print them.")
    assert said(whole) == "Those were all numbers."
    [log] = (sessions.clients["small"].home / ".codex" / "sessions").rglob("*.jsonl")
    kinds = [json.loads(line)["type"] for line in log.read_text().splitlines()]
    assert kinds.count("compacted") == 1


def test_launch(sessions: Codex) -> None:
    options = ("exec", "--json", "--skip-git-repo-check")
    assert said(sessions.launch("lenient", "codex", PROGRAM, *options, "[goodbye]")) == "Goodbye."
