"""A stderr that a full disk does not turn into a fault.

The reaper keeps what a worker writes there in a file. Where that has no room left, Python raises
out of whatever line it was that wanted to say something, be it a library's progress bar or the
report of a fault that the worker would have survived.
"""

from __future__ import annotations

import io
from contextlib import suppress


class LossyText(io.TextIOWrapper):
    """Text to a file descriptor, unbuffered. What cannot be written is lost."""

    def __init__(self, descriptor: int) -> None:
        raw = io.FileIO(descriptor, "w", closefd=False)
        super().__init__(raw, "utf-8", "backslashreplace", write_through=True)

    def write(self, text: str) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()
