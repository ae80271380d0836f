"""Size of the next prefill chunk.

A chunk is one command that the GPU cannot interrupt: too large, and decoding sequences wait for
their next token, or a GPU watchdog ends the process. So the size follows the measured time of the
chunks before. Sizes are powers of two, because each new shape compiles kernels anew.
"""

from __future__ import annotations

from dataclasses import dataclass

SMALLEST = 32
LARGEST = 8192
FIRST = 512
"""Tokens of the first chunk, before any was measured."""


def bucket(tokens: int) -> int:
    """Returns the length that a prefill of ``tokens`` is padded to, where new shapes are expensive.

    Lengths are multiples of a quarter of the power of two below, at least :data:`SMALLEST`: at most
    a quarter is padding, and there are four lengths an octave.
    """
    step = max(SMALLEST, (1 << (tokens.bit_length() - 1)) // 4)
    return -(-tokens // step) * step


@dataclass(slots=True)
class ChunkSizer:
    """Chooses chunks of ``alone_s`` seconds, or of ``shared_s`` while sequences are decoding."""

    alone_s: float
    shared_s: float
    _seconds_per_token: float | None = None

    def tokens(self, *, decoding: bool) -> int:
        """Returns the tokens, over all rows, that a chunk has time for."""
        if self._seconds_per_token is None:
            return FIRST
        target = self.shared_s if decoding else self.alone_s
        return max(SMALLEST, int(target / self._seconds_per_token))

    def size(self, *, decoding: bool, rows: int = 1) -> int:
        """Returns the tokens a row in the next chunk of ``rows`` rows, a power of two."""
        wanted = min(self.tokens(decoding=decoding) // max(rows, 1), LARGEST)
        size = SMALLEST
        while size * 2 <= wanted:
            size *= 2
        return size

    def measured(self, tokens: int, seconds: float, *, planned: bool = False) -> None:
        """Updates the estimate from a measured chunk.

        Chunks below :data:`SMALLEST` say little about large ones and are ignored. A slower chunk
        replaces the estimate at once, a faster one moves it half way: too small a chunk costs less
        than too large a one.

        A chunk whose shape had to be ``planned`` took longer than the next one of that shape will.
        It counts only if it was faster than expected even so. Otherwise one new shape would make
        the chunks after it small, and those would have new shapes in turn.
        """
        if tokens < SMALLEST or seconds <= 0:
            return
        now = seconds / tokens
        before = self._seconds_per_token
        faster = before is not None and now < before
        if planned and not faster:
            return
        self._seconds_per_token = 0.5 * before + 0.5 * now if before and faster else now
