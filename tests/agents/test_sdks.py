"""The SDKs for Node, as released, through sessions with tools."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.agents import (
    AGENTS,
    TEMPLATES,
    Client,
    Model,
    call,
    killed,
    png,
    refusals,
    serving_models,
)
from support.models.scripted import ScriptedReply
from support.server import Server

pytestmark = [pytest.mark.agents, pytest.mark.timeout(600)]

KINDS = [
    "openai-chat",
    "openai-responses",
    "anthropic-messages",
    "ai-openai-chat",
    "ai-openai-responses",
    "ai-openai-compatible",
    "ai-anthropic",
]
VERDICT = "".join(f"Reason {n}: Oslo is colder than Rome.\n" for n in range(1, 9))


COLOURS = '{"colours":["red","blue"]}'
EXPECTED = {"anthropic-messages": 5}
"""Refusals in a session; the prompt that is too long is one. Anthropic's tool runner asks for a
thread in each turn, and goes on without."""
NO_PICTURES = {"openai-chat"}
"""Kinds whose tools answer with text alone."""


def replies() -> list[ScriptedReply]:
    cities = "\n".join(call("get_weather", city=city) for city in ("Oslo", "Rome"))
    colours = dict.fromkeys(KINDS, COLOURS)
    # This SDK asks models that it does not know for a call of a tool instead of a format.
    colours["ai-anthropic"] = f'[{{"name":"json","arguments":{COLOURS}}}]'
    return [
        ScriptedReply("[weather]", f"I ask.\n{cities}"),
        *(
            ScriptedReply(
                f"Rome: 20 degrees, says {kind}", call("save", text=VERDICT), faults=killed(at=50)
            )
            for kind in KINDS
        ),
        *(ScriptedReply(f"saved for {kind}", "Oslo is colder.") for kind in KINDS),
        *(ScriptedReply(f"[colours, {kind}]", reply) for kind, reply in colours.items()),
        ScriptedReply("[look]", call("look")),
        *(ScriptedReply(f"looked for {kind}", "Too red.") for kind in KINDS),
        ScriptedReply("[goodbye]", "Goodbye."),
    ]


@pytest.fixture(scope="module")
def server(modules: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = {name: Model(replies(), template=template) for name, template in TEMPLATES.items()}
    with serving_models(tmp_path_factory.mktemp("sdks"), models) as server:
        yield server


@pytest.fixture
def client(modules: Path, tmp_path: Path) -> Client:
    client = Client(tmp_path, modules)
    (client.work / "red.png").write_bytes(png(255, 0, 0))
    (client.work / "node_modules").symlink_to(modules)
    shutil.copy(AGENTS / "sdks.mjs", client.work)
    return client


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_session(server: Server, client: Client, kind: str, template: str) -> None:
    """Parallel calls and a file saved while the worker is killed; an object; a picture; words; and
    at last a prompt that is too long."""
    losses = len(server.autopsies())
    before = refusals(server)
    *turns, overflow = client.run("sdks.mjs", kind, server.url, template).events
    assert {turn["type"]: turn["text"] for turn in turns if "text" in turn} == {
        "weather": "Oslo is colder.",
        "colours": COLOURS,
        **({} if kind in NO_PICTURES else {"look": "Too red."}),
        "goodbye": "Goodbye.",
    }, turns
    assert (client.work / "saved.txt").read_text() == VERDICT
    assert len(server.autopsies()) == losses + 1

    assert overflow["status"] == 400
    wording = (
        "prompt is too long: 30" if "anthropic" in kind else "maximum context length is 200000"
    )
    assert wording in overflow["error"]
    after = refusals(server)
    assert sum(after.values()) == sum(before.values()) + EXPECTED.get(kind, 1), (before, after)


@pytest.mark.parametrize("kind", ["ai-openai-stored"])
def test_responses_that_are_stored_nowhere(server: Server, client: Client, kind: str) -> None:
    """The AI SDK refers to items of earlier answers unless it is told not to; the error says so."""
    [first, *_] = client.run("sdks.mjs", kind, server.url, "strict").events
    assert first.get("status") == 400, first
    assert "store" in first["error"]
