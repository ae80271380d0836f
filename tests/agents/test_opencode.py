"""opencode, as released, through whole sessions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.agents import (
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

PROGRAM = "opencode-*/bin/opencode"
SMALL = 20_000
SUMMARY = "Numbers were printed. Print on."


def replies(work: Path) -> list[ScriptedReply]:
    """Returns the model's replies in a session whose files lie in ``work``."""
    listing = call("bash", command="ls; echo listed: $((40 + 2))", description="List the files")
    return [
        ScriptedReply(
            "[the notes]", f"I look.\n{call('read', filePath=f'{work}/notes.txt')}\n{listing}"
        ),
        ScriptedReply(
            "listed: 42",
            call("write", filePath=f"{work}/poem.txt", content=POEM),
            faults=killed(at=60),
        ),
        ScriptedReply(
            "Wrote file successfully",
            call(
                "edit",
                filePath=f"{work}/notes.txt",
                oldString="colour: red",
                newString="colour: blue",
            ),
        ),
        ScriptedReply("Edit applied successfully", "The notes say blue now."),
        ScriptedReply(
            "[the picture]",
            call("read", filePath=f"{work}/red.png")
            + "\n"
            + call("bash", command="echo seen: $((40 + 3))", description="Say so"),
        ),
        ScriptedReply("seen: 43", "There was a picture."),
        ScriptedReply("[goodbye]", "Goodbye."),
        *printing(
            call("bash", command=PRINT, description="Print numbers"),
            "Continue if you have next steps",
        ),
        ScriptedReply("Only output the structured summary", SUMMARY),
    ]


class Opencode(Sessions):
    def turn(self, model: str, prompt: str, *options: str, status: int = 0) -> Output:
        client = self.clients[model]
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "Mayfly",
            "options": {"baseURL": f"{self.server.url}/v1"},
            "models": {name: {"name": name} for name in self.clients},
        }
        settings = {
            "autoupdate": False,
            "share": "disabled",
            "permission": "allow",
            "provider": {"mayfly": provider},
            "model": f"mayfly/{model}",
            "small_model": f"mayfly/{model}",
        }
        (client.work / "opencode.json").write_text(json.dumps(settings))
        return client.run(
            client.program(PROGRAM),
            *("run", "--format", "json", *options, prompt),
            environment={"OPENCODE_DISABLE_MODELS_FETCH": "1"},
            status=status,
        )


def said(output: Output) -> str:
    """Returns the last text of a turn."""
    return str(output.of_type("text")[-1]["part"]["text"])


def tools(output: Output) -> list[tuple[Any, Any]]:
    parts = [event["part"] for event in output.of_type("tool_use")]
    return sorted((part["tool"], part["state"]["status"]) for part in parts)


@pytest.fixture(scope="module")
def sessions(modules: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opencode]:
    with Opencode.begun(tmp_path_factory.mktemp("opencode"), modules, replies, SMALL) as sessions:
        yield sessions


@pytest.mark.parametrize("template", TEMPLATES)
def test_session(sessions: Opencode, template: str) -> None:
    """Three turns: two parallel calls, a file written while the worker is killed, an edit; then a
    picture; then words alone."""
    before = refusals(sessions.server)
    work = sessions.clients[template].work

    first = sessions.turn(template, "[the notes] Make them blue.")
    assert said(first) == "The notes say blue now."
    assert tools(first) == [(t, "completed") for t in ("bash", "edit", "read", "write")]
    assert (work / "poem.txt").read_text() == POEM
    assert (work / "notes.txt").read_text() == NOTES.replace("red", "blue")
    assert sessions.losses(template) == 1

    second = sessions.turn(template, "[the picture] Look.", "--continue")
    assert said(second) == "There was a picture."
    assert tools(second) == [("bash", "completed"), ("read", "completed")]

    third = sessions.turn(template, "[goodbye]", "--continue")
    assert said(third) == "Goodbye."
    assert refusals(sessions.server) == before


def test_compaction(sessions: Opencode) -> None:
    """A session that outgrows the context is summarized, and goes on; the client's exit status is
    that of the error nevertheless."""
    whole = sessions.turn("small", "[numbers] Print them.", status=1)
    assert said(whole) == "Those were all numbers."
    assert {event["error"]["name"] for event in whole.of_type("error")} == {"ContextOverflowError"}


def test_launch(sessions: Opencode) -> None:
    options = ("run", "--format", "json")
    output = sessions.launch("lenient", "opencode", PROGRAM, *options, "[goodbye]")
    assert said(output) == "Goodbye."
