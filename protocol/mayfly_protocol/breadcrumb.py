"""The breadcrumb: a record of a worker's forward pass that outlives the worker.

Before each forward pass the engine writes the pass's requests into a small mapped file. The kernel
keeps the file whatever becomes of the process, so the requests of a worker's last pass can be read
after the worker has died.

::

    half 0   | sequence, length, CRC-32 | JSON ...        |
    half 1   | sequence, length, CRC-32 | JSON ...        |     each HALF bytes

The halves are written in turn, and the valid half with the higher sequence number counts. A half
that a kill left incomplete has a wrong checksum; the other half counts in this case, since the pass
that the incomplete half announces had not begun.
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
JSON_BYTES = HALF - _HEADER.size
"""Largest number of bytes of JSON in the record of one forward pass; a worker's file has two
halves, and each half can hold one record."""


@dataclass(frozen=True, slots=True)
class Breadcrumb:
    """Record of one forward pass of a worker, written before the pass, so that it outlives the
    worker. ``phase`` is ``prefill``, ``decode`` or another phase of the engine, ``step`` the number
    of engine steps before the pass. ``young`` are the ``requests`` of a decode step for which this
    worker had sampled only a few tokens."""

    phase: str
    step: int
    requests: tuple[str, ...] = ()
    young: tuple[str, ...] = ()

    @property
    def suspects(self) -> tuple[str, ...]:
        """Requests that may have ended the worker, if this was its last forward pass: all requests
        of a prefill, but of a decode step only those for which this worker had sampled only a few
        tokens (``young``)."""
        match self.phase:
            case "prefill":
                return self.requests
            case "decode":
                return self.young
            case _:
                return ()

    @property
    def marked(self) -> tuple[str, ...]:
        """Requests of a decode step that are unlikely to have ended the worker, since many earlier
        passes with them went well; empty for other phases."""
        if self.phase != "decode":
            return ()
        return tuple(rid for rid in self.requests if rid not in self.young)


class BreadcrumbWriter:
    """Writer of a file with the record of a worker's present forward pass; for use by one thread.

    Raises:
        OSError: the disk has no room for the file. The whole file is allocated at once, since
            writing to a page of a mapped file that has no place on the disk would raise SIGBUS.
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
        """Records a forward pass that is about to begin. ``young`` are those of ``requests`` for
        which the worker has sampled only a few tokens; if not all requests fit into the record, the
        others are left out first."""
        self._sequence += 1
        text = _json_that_fits(phase, step, requests, young)
        start = self._sequence % 2 * HALF
        record = _HEADER.pack(self._sequence, len(text), _checksum(self._sequence, text)) + text
        self._map[start : start + len(record)] = record

    def close(self) -> None:
        self._map.close()


def read(path: Path) -> Breadcrumb | None:
    """Reads from a worker's file the record of its last forward pass; None if there is no file, or
    no valid record in the file.

    The process that wrote the file may be running, stopped or dead.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return None
    halves = [_valid(content[start : start + HALF]) for start in (0, HALF)]
    texts = sorted(half for half in halves if half is not None)
    return _parsed(texts[-1][1]) if texts else None


def _json_that_fits(phase: str, step: int, requests: Sequence[str], young: Sequence[str]) -> bytes:
    fresh = set(young)
    named = [*young, *(rid for rid in requests if rid not in fresh)]
    while True:
        record = {"phase": phase, "step": step, "young": min(len(young), len(named))}
        text = json.dumps({**record, "requests": named}, separators=(",", ":")).encode()
        if len(text) <= JSON_BYTES:
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
    record = json.loads(text)
    requests = tuple(record["requests"])
    return Breadcrumb(record["phase"], record["step"], requests, requests[: record["young"]])
