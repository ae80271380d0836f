"""Peers of one major version understand each other, whichever is older."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mayfly_protocol import PROTOCOL_MINOR, PROTOCOL_VERSION, codec
from mayfly_protocol.codec import SINCE, BadFrame, Channel, OtherVersion, encode, understood
from mayfly_protocol.roster import Ask, AskMetrics, MetricsText, Roster, SlotView
from support.doubles.fake_node import WORDS, FakeNode, answer_words
from support.relay_requests import ask, content
from support.running_front import RunningFront

CHANNELS: list[Channel[Any]] = [
    codec.to_worker,
    codec.to_front_end,
    codec.to_reaper,
    codec.to_slot,
    codec.to_node,
    codec.from_node,
    codec.rosters,
]
PAIRS = [(channel, adapter._type) for channel in CHANNELS for adapter in channel._adapters.values()]
"""Every message, with a channel that takes it."""


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Anything that a field with this type can hold."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return values(arguments[0])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, types.UnionType):
        return st.one_of([values(each) for each in arguments])
    if origin is tuple:
        if arguments[1:] == (...,):
            return st.lists(values(arguments[0]), max_size=2).map(tuple)
        return st.tuples(*map(values, arguments))
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=2)
    if dataclasses.is_dataclass(hint):
        return messages(hint)  # type: ignore[arg-type]
    return {
        bool: st.booleans(),
        int: st.integers(0, 2**40),
        float: st.floats(0, 1e6),
        str: st.text(max_size=8),
        bytes: st.binary(max_size=8),
        type(None): st.none(),
        Any: st.none() | st.integers(0, 9) | st.text(max_size=4),
    }[hint]


def messages(kind: type) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind, include_extras=True)
    return st.builds(
        kind, **{field.name: values(hints[field.name]) for field in dataclasses.fields(kind)}
    )


def roundtrip_of(frame: bytes) -> Any:
    return msgpack.unpackb(frame, strict_map_key=False)


@pytest.mark.parametrize(("channel", "kind"), PAIRS, ids=lambda each: getattr(each, "__name__", ""))
class TestEveryMessage:
    def test_of_an_older_peer_lacks_fields(self, channel: Channel[Any], kind: type) -> None:
        """Whichever of those with a default it does not know: then the default is meant."""
        optional = {
            field.name
            for field in dataclasses.fields(kind)
            if field.default is not dataclasses.MISSING
            or field.default_factory is not dataclasses.MISSING
        }

        @settings(deadline=None, max_examples=10)
        @given(messages(kind), st.sets(st.sampled_from(sorted(optional) or [""])))
        def check(message: Any, unknown: set[str]) -> None:
            version, name, fields = roundtrip_of(encode(message))
            older = {key: value for key, value in fields.items() if key not in unknown}
            read = channel.decode(msgpack.packb([version, name, older]))
            for field in dataclasses.fields(kind):
                if field.name not in unknown:
                    assert getattr(read, field.name) == getattr(message, field.name)
                elif field.default is not dataclasses.MISSING:
                    assert getattr(read, field.name) == field.default
                elif field.default_factory is not dataclasses.MISSING:
                    assert getattr(read, field.name) == field.default_factory()

        check()

    def test_of_a_newer_peer_has_more(self, channel: Channel[Any], kind: type) -> None:
        @settings(deadline=None, max_examples=10)
        @given(messages(kind), st.text(max_size=5), values(Any))
        def check(message: Any, name: str, value: Any) -> None:
            version, kind_name, fields = roundtrip_of(encode(message))
            newer = {f"x_{name}": value, **fields}
            assert channel.decode(msgpack.packb([version, kind_name, newer])) == message

        check()

    def test_of_another_major_version_is_refused(self, channel: Channel[Any], kind: type) -> None:
        @settings(deadline=None, max_examples=5)
        @given(messages(kind), st.integers(0, 99) | st.text(max_size=3) | st.none())
        def check(message: Any, version: Any) -> None:
            if version == PROTOCOL_VERSION:
                return
            _, name, fields = roundtrip_of(encode(message))
            with pytest.raises(OtherVersion, match="protocol version") as refused:
                channel.decode(msgpack.packb([version, name, fields]))
            assert refused.value.reason == "version"

        check()


@settings(deadline=None)
@given(st.sampled_from(CHANNELS), st.binary(max_size=60))
def test_nonsense_is_refused_in_words(channel: Channel[Any], frame: bytes) -> None:
    with pytest.raises(BadFrame) as refused:
        channel.decode(frame)
    assert str(refused.value)


def test_a_view_inside_a_newer_roster_may_have_more_too() -> None:
    view = SlotView("s", "m", "ready", 1)
    version, name, fields = roundtrip_of(encode(Roster("n", "e", 1, 1, (view,))))
    fields["slots"][0]["colour"] = "red"
    assert codec.rosters.decode(msgpack.packb([version, name, fields])).slots == (view,)


def test_what_is_new_goes_to_nobody_who_does_not_know_it() -> None:
    assert max(SINCE.values()) <= PROTOCOL_MINOR
    assert understood(Ask(), 0)
    for message in (AskMetrics(), MetricsText("")):
        assert not understood(message, 0)
        assert understood(message, PROTOCOL_MINOR)


@pytest.fixture
def old() -> Iterator[FakeNode]:
    """A node of the first minor version: it knows no metrics, and says nothing of a version."""
    with FakeNode() as node:
        node.change(minor=0)
        yield node


def test_an_old_node_serves_a_new_front_end(old: FakeNode) -> None:
    """And is not asked for metrics, as a new one is."""
    old.worker(answer_words())
    with RunningFront(old.control, node_metrics=True) as front:
        assert content(ask(front)) == "".join(WORDS)
        for _ in range(2):
            assert front.metric("mayfly_node_scrapes_total") == 0
        [node] = front.client.get("/mayfly/status").json()["nodes"]
        assert node["protocol"] == "1.0"
