"""How large the next prefill chunk may be.

A chunk is one command that the GPU cannot leave: too large, and rows that decode wait for their
next token, or a GPU watchdog strikes. So the size follows the measured time of the chunks before
it. Sizes come from a ladder of powers of two, because each new shape compiles kernels anew.
"""

from __future__ import annotations

from dataclasses import dataclass

SMALLEST = 32
LARGEST = 8192
FIRST = 512


def bucket(tokens: int) -> int:
    """The next length that prefill is padded to, where each new shape costs more than padding:
    a quarter of the power of two below, at least :data:`SMALLEST`. At most a quarter is wasted,
    and there are four lengths an octave."""
    step = max(SMALLEST, (1 << (tokens.bit_length() - 1)) // 4)
    return -(-tokens // step) * step


@dataclass(slots=True)
class ChunkSizer:
    """Aims at ``alone_s`` seconds a chunk, and at ``shared_s`` while rows are decoding."""

    alone_s: float
    shared_s: float
    _seconds_per_token: float | None = None

    def tokens(self, *, decoding: bool) -> int:
        """Tokens, over all rows, that a chunk has time for."""
        if self._seconds_per_token is None:
            return FIRST
        target = self.shared_s if decoding else self.alone_s
        return max(SMALLEST, int(target / self._seconds_per_token))

    def size(self, *, decoding: bool, rows: int = 1) -> int:
        """Tokens a row in the next chunk of so many rows, a power of two."""
        wanted = min(self.tokens(decoding=decoding) // max(rows, 1), LARGEST)
        size = SMALLEST
        while size * 2 <= wanted:
            size *= 2
        return size

    def measured(self, tokens: int, seconds: float, *, planned: bool = False) -> None:
        """Learns from a chunk. Small ones say little about large ones and are left out. A slower
        chunk is believed at once, a faster one by and by: too small a chunk costs less than too
        large a one.

        A chunk whose shape had to be ``planned`` took longer than the next one of that shape will.
        It is believed only if it was faster than expected even so. Otherwise one new shape would
        make the chunks after it small, and of new shapes in turn.
        """
        if tokens < SMALLEST or seconds <= 0:
            return
        now = seconds / tokens
        before = self._seconds_per_token
        faster = before is not None and now < before
        if planned and not faster:
            return
        self._seconds_per_token = 0.5 * before + 0.5 * now if before and faster else now
