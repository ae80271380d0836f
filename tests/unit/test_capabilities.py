"""Capabilities of a model, from the worker's model card to what clients and people see."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mayfly_protocol.capabilities import HELP, Capabilities, from_shown, in_words, shown
from mayfly_protocol.codec import encode, to_reaper
from mayfly_protocol.lifecycle import ModelCard, Ready
from support.doubles.fake_node import FakeNode
from support.running_front import RunningFront
from support.server import wait_for

ONE_ROW = Capabilities(
    context=8192,
    context_from="max_position_embeddings in config.json",
    rows=1,
    one_row_because="mlx-lm cannot batch caches of the class Odd",
    padding=False,
    prefixes="stored_lengths",
    window=512,
    reasoning=True,
    reasoning_parser="think",
    tools=True,
    tool_parser="json_tools",
    template_variables=("enable_thinking",),
)
ANY = st.builds(
    Capabilities,
    context=st.integers(0, 1 << 30),
    context_from=st.text(max_size=9),
    rows=st.integers(0, 99),
    one_row_because=st.text(max_size=9),
    padding=st.sampled_from([None, True, False]),
    prefixes=st.sampled_from(["", "any_length", "stored_lengths", "none"]),
    window=st.integers(0, 9999),
    chat=st.booleans(),
    reasoning=st.booleans(),
    reasoning_parser=st.sampled_from(["", "think"]),
    tools=st.booleans(),
    tool_parser=st.sampled_from(["", "json_tools"]),
    template_tools=st.booleans(),
    template_variables=st.lists(st.text(max_size=5), max_size=3).map(tuple),
)


@given(ANY)
def test_they_travel_whole(can: Capabilities) -> None:
    assert from_shown(shown(can)) == can
    assert shown(can).keys() == HELP.keys()
    ready = Ready("ipc:///w", ModelCard(**asdict(can), digest="d"))
    received = to_reaper.decode(encode(ready))
    assert received == ready
    assert isinstance(received, Ready) and shown(received.card) == shown(can)


@given(ANY)
def test_words_are_complete(can: Capabilities) -> None:
    words = in_words(can)
    assert all(words.values())
    assert {"context", "sequences"} <= words.keys()
    assert can.one_row_because in words["sequences"]
    assert can.context_from in words["context"]
    assert ("tools" in words) == can.chat


OTHERS: dict[str, Any] = {
    "context": 7,
    "context_from": "a key",
    "rows": 7,
    "one_row_because": "a reason",
    "padding": True,
    "prefixes": "any_length",
    "window": 7,
    "chat": False,
    "reasoning": True,
    "reasoning_parser": "think",
    "tool_parser": "json_tools",
    "template_tools": True,
    "template_variables": ("mood",),
}


@pytest.mark.parametrize("name", sorted(HELP.keys() - {"tools"}))  # a tool_parser says the same
def test_another_value_has_other_words(name: str) -> None:
    other = Capabilities(**{name: OTHERS[name]})
    assert in_words(other) != in_words(Capabilities())


def unloaded(front: RunningFront) -> bool:
    [model] = front.client.get("/v1/models").json()["data"]
    return model["mayfly"] is None


def test_M09_B07_clients_see_all_of_them() -> None:
    card = ModelCard(**asdict(ONE_ROW), digest="d")
    with FakeNode() as node:
        node.worker(card=card)
        with RunningFront(node.control) as front:
            [model] = front.client.get("/v1/models").json()["data"]
            one = front.client.get(f"/v1/models/{model['id']}").json()
            [slot] = front.client.get("/mayfly/status").json()["nodes"][0]["slots"]
            node.show(replace(node.view("slot-1"), card=None, state="loading"))
            wait_for(lambda: unloaded(front), "the model is not loaded")
    assert one == model
    assert model["mayfly"] == slot["capabilities"] == shown(ONE_ROW)
    assert model["max_model_len"] == ONE_ROW.context
    assert slot["rows"] == 1
