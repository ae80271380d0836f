"""Frames: every message survives encoding and decoding, and no bytes do harm."""

from __future__ import annotations

import dataclasses
import functools
import os
import types
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mayfly_protocol import PROTOCOL_VERSION, codec
from mayfly_protocol.codec import BadFrame, Channel, encode
from mayfly_protocol.lifecycle import Cause, Fault, ToReaper, ToSlot
from mayfly_protocol.roster import FromNode, Roster, ToNode
from mayfly_protocol.serving import ToFrontEnd, ToWorker

UNIONS: dict[str, Any] = {
    "to_worker": ToWorker,
    "to_front_end": ToFrontEnd,
    "to_reaper": ToReaper,
    "to_slot": ToSlot,
    "to_node": ToNode,
    "from_node": FromNode,
    "rosters": Roster,
}
CHANNELS: dict[str, Channel[Any]] = {name: getattr(codec, name) for name in UNIONS}
TYPES = {
    name: {kind.__name__: kind for kind in get_args(union) or (union,)}
    for name, union in UNIONS.items()
}
MESSAGES = [(name, kind) for name, kinds in TYPES.items() for kind in kinds]

TEXT = st.text(max_size=8)
NUMBERS = st.integers(-(2**63), 2**64 - 1)
FLOATS = st.floats(allow_nan=False)
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | FLOATS | TEXT | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | FLOATS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXT,
    int: NUMBERS,
    float: FLOATS,
    bool: st.booleans(),
    bytes: st.binary(max_size=8),
    type(None): st.none(),
    Any: JSON,
}


@functools.cache
def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    if hint in PLAIN:
        return PLAIN[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return values(arguments[0])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(values, arguments))
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=3)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    assert dataclasses.is_dataclass(hint), hint
    hints = get_type_hints(hint, include_extras=True)
    return st.builds(
        hint, **{field.name: values(hints[field.name]) for field in dataclasses.fields(hint)}
    )


def test_every_channel_is_tested() -> None:
    there = {name for name, value in vars(codec).items() if isinstance(value, Channel)}
    assert there == set(UNIONS)


@pytest.mark.parametrize(("channel", "kind"), MESSAGES)
def test_a_message_arrives_as_it_was_sent(channel: str, kind: str) -> None:
    @settings(max_examples=25, deadline=None)
    @given(values(TYPES[channel][kind]))
    def there(message: Any) -> None:
        assert CHANNELS[channel].decode(encode(message)) == message

    there()


@pytest.mark.parametrize("channel", CHANNELS)
class TestNonsense:
    def test_bytes(self, channel: str) -> None:
        @settings(max_examples=100, deadline=None)
        @given(st.binary(max_size=200))
        def refused(frame: bytes) -> None:
            with pytest.raises(BadFrame):
                CHANNELS[channel].decode(frame)

        refused()

    def test_frames_with_other_contents(self, channel: str) -> None:
        """A message of this channel, or a refusal: nothing else."""
        names = st.sampled_from([*TYPES[channel], "Nonsense", 5, None])
        versions = st.just(PROTOCOL_VERSION) | ANYTHING
        fields = {
            field.name for kind in TYPES[channel].values() for field in dataclasses.fields(kind)
        }
        contents = ANYTHING | st.dictionaries(st.sampled_from(sorted(fields)), ANYTHING, max_size=8)

        @settings(max_examples=100, deadline=None)
        @given(versions, names, contents)
        def safe(version: Any, name: Any, content: Any) -> None:
            frame = msgpack.packb([version, name, content])
            try:
                message = CHANNELS[channel].decode(frame)
            except BadFrame:
                return
            assert type(message).__name__ == name
            assert CHANNELS[channel].decode(encode(message)) == message

        safe()

    def test_frames_with_a_flipped_byte(self, channel: str) -> None:
        kinds = list(TYPES[channel].values())

        @settings(max_examples=100, deadline=None)
        @given(st.data())
        def safe(data: st.DataObject) -> None:
            frame = bytearray(encode(data.draw(st.sampled_from(kinds).flatmap(values))))
            at = data.draw(st.integers(0, len(frame) - 1))
            frame[at] ^= data.draw(st.integers(1, 255))
            try:
                CHANNELS[channel].decode(bytes(frame))
            except BadFrame as error:
                assert len(str(error)) < 500

        safe()

    def test_deep_frames(self, channel: str) -> None:
        name = next(iter(TYPES[channel]))
        head = b"\x93\x01" + msgpack.packb(name)
        for deep in (b"\x91" * 10_000 + b"\x00", b"\x81\xa1a" * 10_000 + b"\x00"):
            with pytest.raises(BadFrame):
                CHANNELS[channel].decode(head + deep)

    def test_frames_that_promise_too_much(self, channel: str) -> None:
        """Lengths of gigabytes with nothing behind them reserve nothing."""
        for frame in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"):
            with pytest.raises(BadFrame):
                CHANNELS[channel].decode(frame)


def test_the_name_of_a_file_that_is_no_unicode_travels_as_escapes() -> None:
    cause = Cause("OSError", os.fsdecode(b"/models/caf\xe9: no such file"))
    frame = encode(Fault("model_load", "model", cause))
    arrived = codec.to_reaper.decode(frame)
    assert isinstance(arrived, Fault)
    assert arrived.first.text == "/models/caf\\udce9: no such file"


def test_what_has_no_type_in_messagepack_cannot_be_sent() -> None:
    for value in (object(), {1, 2}, 1j):
        with pytest.raises(TypeError):
            encode(value)
