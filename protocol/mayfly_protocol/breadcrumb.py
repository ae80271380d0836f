"""What a worker's forward pass is about, left where it can be read when the worker is dead.

Before each forward pass the engine writes into a small mapped file. The kernel keeps what was
written whatever becomes of the process, so this says which requests were in the pass that died.

::

    half 0   | sequence, length, CRC-32 | JSON ...        |
    half 1   | sequence, length, CRC-32 | JSON ...        |     each HALF bytes

The halves are written in turn and the valid one with the higher sequence counts. One that a kill
left half-written does not have the checksum that it says, and the one before it is the truth:
the pass that it announces had not begun.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HALF = 8192
_HEADER = struct.Struct("<QII")
ROOM = HALF - _HEADER.size
"""Bytes of JSON."""


@dataclass(frozen=True, slots=True)
class Breadcrumb:
    """``phase`` and ``step`` as in the worker's beats. ``young`` are those of the ``requests``
    that had drawn only a few tokens on this worker, in a decode step."""

    phase: str
    step: int
    requests: tuple[str, ...] = ()
    young: tuple[str, ...] = ()

    @property
    def suspects(self) -> tuple[str, ...]:
        """Who may have killed the worker, if this was its last pass: a prefill's own requests; of
        a decode step those that were new in it."""
        match self.phase:
            case "prefill":
                return self.requests
            case "decode":
                return self.young
            case _:
                return ()

    @property
    def marked(self) -> tuple[str, ...]:
        """Who else was there when it died: of a decode step those that had been for long."""
        if self.phase != "decode":
            return ()
        return tuple(rid for rid in self.requests if rid not in self.young)


class BreadcrumbWriter:
    """Makes the file anew. For one thread.

    Raises:
        OSError: there is no room for it. All of it is allocated here: a page of a mapped file
            that turns out to have no place on the disk would be a SIGBUS.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            os.write(descriptor, bytes(2 * HALF))
            self._map = mmap.mmap(descriptor, 2 * HALF)
        finally:
            os.close(descriptor)
        self._sequence = 0

    def write(
        self, phase: str, step: int, requests: Sequence[str] = (), young: Sequence[str] = ()
    ) -> None:
        """Announces a pass. Where there is no room for all requests, old ones are left out."""
        self._sequence += 1
        text = _fitting(phase, step, requests, young)
        start = self._sequence % 2 * HALF
        record = _HEADER.pack(self._sequence, len(text), _checksum(self._sequence, text)) + text
        self._map[start : start + len(record)] = record

    def close(self) -> None:
        self._map.close()


def read(path: Path) -> Breadcrumb | None:
    """What was announced last; None if nothing was, or if there is no such file.

    The process that wrote it may be alive, stopped or gone.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return None
    halves = [_valid(content[start : start + HALF]) for start in (0, HALF)]
    texts = sorted(half for half in halves if half is not None)
    return _parsed(texts[-1][1]) if texts else None


def _fitting(phase: str, step: int, requests: Sequence[str], young: Sequence[str]) -> bytes:
    fresh = set(young)
    named = [*young, *(rid for rid in requests if rid not in fresh)]
    while True:
        record = {"phase": phase, "step": step, "young": min(len(young), len(named))}
        text = json.dumps({**record, "requests": named}, separators=(",", ":")).encode()
        if len(text) <= ROOM:
            return text
        named = named[: len(named) * 3 // 4]


def _checksum(sequence: int, text: bytes) -> int:
    return zlib.crc32(text, zlib.crc32(sequence.to_bytes(8, "little")))


def _valid(half: bytes) -> tuple[int, bytes] | None:
    if len(half) < _HEADER.size:
        return None
    sequence, length, checksum = _HEADER.unpack_from(half)
    text = half[_HEADER.size : _HEADER.size + length]
    if not sequence or len(text) != length or checksum != _checksum(sequence, text):
        return None
    return sequence, text


def _parsed(text: bytes) -> Breadcrumb:
    told = json.loads(text)
    requests = tuple(told["requests"])
    return Breadcrumb(told["phase"], told["step"], requests, requests[: told["young"]])
