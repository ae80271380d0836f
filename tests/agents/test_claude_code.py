"""Claude Code, as released, through whole sessions."""

from __future__ import annotations

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

SUMMARY = (
    "<analysis>Numbers.</analysis>\n<summary>Numbers were printed. The summary ends.</summary>"
)
PROGRAM = "@anthropic-ai/claude-code-*/claude"
PRINTING = ("--print", "--output-format", "stream-json", "--verbose")
SMALL = 33_000
"""Tokens of the context in which a session overflows. The first prompt has 21,500."""


def replies(work: Path) -> list[ScriptedReply]:
    """Returns the model's replies in a session whose files lie in ``work``."""
    listing = call("Bash", command="ls; echo listed: $((40 + 2))", description="List the files")
    return [
        ScriptedReply(
            "[the notes]",
            f"I look.\n{call('Read', file_path=f'{work}/notes.txt')}\n{listing}",
        ),
        ScriptedReply(
            "listed: 42",
            call("Write", file_path=f"{work}/poem.txt", content=POEM),
            faults=killed(at=60),
        ),
        ScriptedReply(
            "File created successfully",
            call(
                "Edit",
                file_path=f"{work}/notes.txt",
                old_string="colour: red",
                new_string="colour: blue",
            ),
        ),
        ScriptedReply("has been updated", "The notes say blue now."),
        ScriptedReply(
            "[the picture]",
            call("Read", file_path=f"{work}/red.png")
            + "\n"
            + call("Bash", command="echo seen: $((40 + 3))", description="Say so"),
        ),
        ScriptedReply("seen: 43", "There was a picture."),
        ScriptedReply(
            "[the jobs]",
            call("ToolSearch", query="select:CronList", max_results=1)
            + "\n"
            + call("Bash", command="echo searched: $((40 + 4))", description="Say so"),
        ),
        ScriptedReply("searched: 44", call("CronList")),
        ScriptedReply("[goodbye]", "Goodbye."),
        ScriptedReply("No scheduled jobs", "There are no jobs."),
        *printing(call("Bash", command=PRINT, description="Print numbers")),
        ScriptedReply("Your task is to create a detailed summary", SUMMARY),
    ]


class ClaudeCode(Sessions):
    def turn(self, model: str, prompt: str, *options: str, status: int = 0) -> Output:
        client = self.clients[model]
        return client.run(
            client.program(PROGRAM),
            *PRINTING,
            *("--include-partial-messages", "--permission-mode", "acceptEdits"),
            *("--allowedTools", "Bash,Read,Edit,Write", "--model", model, *options),
            *("--", prompt),
            environment={
                "ANTHROPIC_BASE_URL": self.server.url,
                "ANTHROPIC_AUTH_TOKEN": "none",
                "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "DISABLE_AUTOUPDATER": "1",
            },
            status=status,
        )


def result(output: Output) -> Any:
    [ended] = output.of_type("result")
    assert not ended["is_error"], ended
    return ended["result"]


def blocks(output: Output, kind: str) -> list[dict[str, Any]]:
    return [
        block
        for event in output.of_type("assistant", "user")
        for block in event["message"]["content"]
        if isinstance(block, dict) and block["type"] == kind
    ]


@pytest.fixture(scope="module")
def sessions(modules: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClaudeCode]:
    with ClaudeCode.begun(tmp_path_factory.mktemp("claudecode"), modules, replies, SMALL) as begun:
        yield begun


@pytest.mark.parametrize("template", TEMPLATES)
def test_session(sessions: ClaudeCode, template: str) -> None:
    """Three turns: two parallel calls, a file written while the worker is killed, an edit; then a
    picture; then a tool that is loaded when it is searched for."""
    before = refusals(sessions.server)
    work = sessions.clients[template].work

    first = sessions.turn(template, "[the notes] Make them blue.")
    assert result(first) == "The notes say blue now."
    assert [use["name"] for use in blocks(first, "tool_use")] == ["Read", "Bash", "Write", "Edit"]
    assert (work / "poem.txt").read_text() == POEM
    assert (work / "notes.txt").read_text() == NOTES.replace("red", "blue")
    assert sessions.losses(template) == 1
    deltas = [
        event["event"]["delta"]
        for event in first.of_type("stream_event")
        if event["event"]["type"] == "content_block_delta"
    ]
    assert sum(delta["type"] == "input_json_delta" for delta in deltas) > 100

    second = sessions.turn(template, "[the picture] Look.", "--continue")
    assert result(second) == "There was a picture."
    assert [use["name"] for use in blocks(second, "tool_use")] == ["Read", "Bash"]

    third = sessions.turn(template, "[the jobs] Are there any?", "--continue")
    assert result(third) == "There are no jobs."
    assert [use["name"] for use in blocks(third, "tool_use")] == ["ToolSearch", "Bash", "CronList"]
    assert refusals(sessions.server) == before


def test_compaction(sessions: ClaudeCode) -> None:
    """A session that outgrows the context is summarized, and goes on."""
    whole = sessions.turn("small", "[numbers] Print them.")
    assert result(whole) == "Those were all numbers."
    kinds = [event.get("subtype") for event in whole.of_type("system")]
    assert "compact_boundary" in kinds, kinds


def test_sessions_share_their_prompt(sessions: ClaudeCode) -> None:
    """The prefix cache has what precedes the user's words in a second session's first prompt; a
    fifth follows them."""
    usages = [
        sessions.turn("strict", f"[goodbye] {n}").of_type("result")[0]["usage"] for n in range(2)
    ]
    cached = usages[1]["cache_read_input_tokens"]
    assert cached >= 0.75 * (cached + usages[1]["input_tokens"]), usages


def test_launch(sessions: ClaudeCode) -> None:
    output = sessions.launch("strict", "claude", PROGRAM, *PRINTING, "--", "[goodbye]")
    assert result(output) == "Goodbye."
