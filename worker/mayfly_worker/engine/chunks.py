"""Size of the next prefill chunk.

A chunk is one GPU command that cannot be interrupted: if it is too large, decoding sequences wait
for their next token, or a GPU watchdog ends the process. So the size follows the measured time of
earlier chunks. It follows the memory that earlier chunks of the same prompts took, too: attention
scores of a chunk are computed against all columns of the KV cache, or against a window and the
chunk itself, so that a large chunk takes more memory for each token, and with windows more time.
Sizes are powers of two, because each new shape compiles kernels anew.
"""

from __future__ import annotations

from dataclasses import dataclass

SMALLEST = 32
LARGEST = 2048
"""Tokens of each row in the largest prefill chunk, as in mlx-lm. Four times as many took up to ten
times the memory, and no less time."""
MOST = 8 * LARGEST
"""Tokens of the largest prefill chunk over all rows, as in mlx-lm."""
FIRST = 512
"""Tokens of the first prefill chunk, before any chunk was measured."""


def bucket(tokens: int) -> int:
    """Returns the length to which a prefill of ``tokens`` is padded on devices where new shapes are
    expensive.

    Lengths are multiples of a quarter of the largest power of two up to ``tokens``, and of at least
    32 tokens: at most a quarter is padding, and there are four lengths from each power of two to
    the next.
    """
    step = max(SMALLEST, (1 << (tokens.bit_length() - 1)) // 4)
    return -(-tokens // step) * step


@dataclass(slots=True)
class ChunkSizer:
    """Chooses the sizes of prefill chunks, so that a chunk takes about ``alone_s`` seconds, or
    ``shared_s`` seconds while sequences are decoding."""

    alone_s: float
    shared_s: float
    _seconds_per_token: float | None = None

    def tokens(self, *, decoding: bool) -> int:
        """Returns the number of tokens, over all rows, that the next chunk can prefill within its
        target duration; the duration depends on whether sequences are ``decoding`` meanwhile."""
        if self._seconds_per_token is None:
            return FIRST
        target = self.shared_s if decoding else self.alone_s
        return max(SMALLEST, min(int(target / self._seconds_per_token), MOST))

    def size(self, *, decoding: bool, rows: int = 1, at_most: int = MOST) -> int:
        """Returns the number of tokens of each row in the next chunk of ``rows`` rows, a power of
        two; ``at_most`` tokens over all rows fit into memory."""
        wanted = min(min(self.tokens(decoding=decoding), at_most) // max(rows, 1), LARGEST)
        size = SMALLEST
        while size * 2 <= wanted:
            size *= 2
        return size

    def measured(self, tokens: int, seconds: float, *, planned: bool = False) -> None:
        """Updates the estimated time per token from a measured chunk.

        Chunks below 32 tokens say little about large chunks and are ignored. A slower chunk
        replaces the estimate at once, a faster chunk moves it half way: too small a chunk costs
        less than too large a chunk.

        ``planned`` says that the device first had to plan kernels for the chunk's shape, so that
        the chunk took longer than the next chunk of that shape will. Such a chunk counts only if it
        was faster than the estimate all the same. Otherwise one new shape would make the following
        chunks small, whose shapes would be new in turn.
        """
        if tokens < SMALLEST or seconds <= 0:
            return
        now = seconds / tokens
        before = self._seconds_per_token
        faster = before is not None and now < before
        if planned and not faster:
            return
        self._seconds_per_token = 0.5 * before + 0.5 * now if before and faster else now
