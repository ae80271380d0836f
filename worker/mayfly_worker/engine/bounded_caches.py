"""KV caches of the options ``--max-kv-size`` and ``--kv-bits``, alone and in a batch.

::

    one sequence, mlx-lm's layout      batch: column t holds token t of each row, and after the
                                       last column come the first ones that are not kept
    RotatingKVCache(keep=4)
      -> BoundedKVCache                a b c d e f - -        6 tokens
    QuantizedKVCache                   a b c d i j g h        10 tokens, of which 4 are kept
      -> GroupedKVCache                a b c - - - - -        3 tokens

mlx-lm has batches of neither: its batch of bounded caches drops the first tokens of a sequence,
which it keeps outside of a batch. A row does not move here when others join or leave, so that each
row's tokens are where they would be without the others.

A bounded cache keeps the first tokens of a sequence, to which models pay much attention whatever
they say ("attention sinks": Xiao et al., Efficient Streaming Language Models with Attention Sinks,
2023), and the last ones. Each token attends to the tokens that the cache holds when that token is
the last one, in decoding and in prefill, so that results do not depend on the sizes of chunks.
mlx-lm's own cache does the same in decoding; in prefill its mask hides the kept tokens from all but
the first few of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache
from numpy.typing import NDArray

KEPT = 4
"""First tokens of a sequence that a bounded cache keeps, as mlx-lm's make_prompt_cache has it."""
GROUPS = (64, 32)
"""Numbers of values that are quantized together, best first: larger groups take less memory."""
_STEP = 256
"""Columns by which a batch's cache grows."""
_UNBOUNDED = 1 << 30

Tokens: TypeAlias = NDArray[np.int32]
"""Positions of tokens, or numbers of tokens."""


class BoundedKVCache(RotatingKVCache):  # type: ignore[misc]
    """KV cache of one sequence that holds its first tokens and its last ones, at most ``max_size``
    in all."""

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size, keep=KEPT)

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        _refuse_window(window_size)
        if N == 1:
            return None
        if self.offset + N <= self.max_size and not return_array:
            return "causal"
        held: int = min(self.offset, self.max_size - 1)
        columns = mx.arange(held + N)
        queries = mx.arange(held, held + N)[:, None]
        recent: mx.array = (columns < KEPT) | (columns > queries - (self.max_size - KEPT))
        return recent & (columns <= queries)

    @classmethod
    def merge(cls, caches: Sequence[BoundedKVCache]) -> BatchBoundedKVCache:
        batch = BatchBoundedKVCache(len(caches), caches[0].max_size)
        batch.fill([c.offset for c in caches], [_ordered(c) for c in caches])
        return batch


class GroupedKVCache(QuantizedKVCache):  # type: ignore[misc]
    """Quantized KV cache of one sequence. ``group_size`` 0 stands for the largest that divides the
    width of the model's heads."""

    def __init__(self, bits: int, group_size: int = 0) -> None:
        super().__init__(group_size=group_size, bits=bits)
        self.keys: Any
        self.values: Any
        self.group_size: int

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        if self.keys is None:
            self.group_size = group_size(keys, values, self.group_size)
            # mlx-lm's own widths are wrong for 3, 5 and 6 bits.
            self.keys, self.values = (self._empty(x) for x in (keys, values))
        return super().update_and_fetch(keys, values)

    def _empty(self, like: mx.array) -> tuple[mx.array, ...]:
        *outer, _, width = like.shape
        groups = width // self.group_size
        return (
            mx.zeros((*outer, 0, width * self.bits // 32), mx.uint32),
            mx.zeros((*outer, 0, groups), like.dtype),
            mx.zeros((*outer, 0, groups), like.dtype),
        )

    @classmethod
    def merge(cls, caches: Sequence[GroupedKVCache]) -> BatchQuantizedKVCache:
        known = next((c for c in caches if c.keys is not None), caches[0])
        batch = BatchQuantizedKVCache(len(caches), known.bits, known.group_size)
        batch.fill([c.offset for c in caches], [_ordered(c) for c in caches])
        return batch


class _BatchCache:
    """KV cache of a batch whose rows have places of their own: see the module's picture. Lengths
    are known on the host, so that nothing waits for the device.

    ``lengths`` are the numbers of tokens that the rows have had, ``max_size`` is the largest number
    of columns, of which the first ``keep`` are not used again.
    """

    def __init__(self, rows: int, max_size: int = _UNBOUNDED, keep: int = 0) -> None:
        self.lengths = [0] * rows
        self.max_size = max_size
        self.keep = keep
        self._arrays: list[mx.array] = []  # [rows, heads, columns, ...] each
        self._coming: list[int] | None = None

    def _stored(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        """Returns new keys and values as arrays of the form in which they are stored."""
        raise NotImplementedError

    def _fetched(self, arrays: list[mx.array]) -> tuple[Any, Any]:
        """Returns stored arrays as keys and values."""
        raise NotImplementedError

    @property
    def offset(self) -> mx.array:
        """Position of each row's next token, shape [rows]."""
        return mx.array(self.lengths)

    @property
    def state(self) -> list[mx.array]:
        return self._arrays

    def empty(self) -> bool:
        return not self._arrays

    def size(self) -> int:
        return min(max(self.lengths), self.max_size)

    def prepare(self, *, lengths: Sequence[int], right_padding: Sequence[int]) -> None:
        """Announces a chunk of which each row has ``lengths`` tokens, and padding after them."""
        self._coming = list(lengths)

    def finalize(self) -> None:
        self._coming = None

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array:
        """Returns the columns to which each of the next ``N`` tokens attends, shape [rows, 1, N,
        columns]."""
        _refuse_window(window_size)
        before = self._counts()
        if N == 1 and self._coming is None:
            after = self._tokens_at(before + 1, self._room(1))
            return mx.array(after >= 0)[:, None, None, :]
        new = before + np.arange(N, dtype=np.int32)
        held = self._tokens_at(before, self._columns)
        tokens = mx.array(np.concatenate([held, new], axis=1))[:, None, None, :]
        queries = mx.array(new)[:, None, :, None]
        recent = (tokens < self.keep) | (tokens > queries - (self.max_size - self.keep))
        return (tokens >= 0) & (tokens <= queries) & recent

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        new = self._stored(keys, values)
        many = keys.shape[2]
        if many == 1 and self._coming is None:
            self._widen(self._room(1), new)
            places = mx.array(self._places(self._counts()))[:, :, None, None]
            self._arrays = [
                mx.put_along_axis(a, mx.broadcast_to(places, x.shape), x, axis=2)
                for a, x in zip(self._arrays, new, strict=True)
            ]
            self.lengths = [n + 1 for n in self.lengths]
            return self._fetched(self._arrays)
        coming = self._coming or [many] * len(self.lengths)
        held, before = self._columns, self._counts()
        if held:
            new = [mx.concatenate([a, x], axis=2) for a, x in zip(self._arrays, new, strict=True)]
        self.lengths = [n + more for n, more in zip(self.lengths, coming, strict=True)]
        tokens = self._tokens_at(self._counts(), self._room(0))
        columns = np.arange(tokens.shape[1], dtype=np.int32)
        source = np.where(tokens < before, columns, held + tokens - before)
        index = mx.array(np.where(tokens < 0, 0, source))[:, None, :, None]
        self._arrays = [mx.take_along_axis(x, index, axis=2) for x in new]
        return self._fetched(new)

    def fill(self, lengths: Sequence[int], rows: Sequence[list[mx.array]]) -> None:
        """Stores single sequences of these lengths in an empty cache: for each row its arrays in
        the order of the tokens, with the first ``keep`` tokens and the last ones; none for an empty
        row."""
        self.lengths = list(lengths)
        like = next((arrays for arrays in rows if arrays), None)
        if like is None:
            return
        tokens = self._tokens_at(self._counts(), self._room(0))
        placed = []
        for arrays, length, wanted in zip(rows, lengths, tokens, strict=True):
            if not arrays:
                shapes = [(*a.shape[:2], len(wanted), a.shape[3]) for a in like]
                arrays = [mx.zeros(s, a.dtype) for s, a in zip(shapes, like, strict=True)]
            else:
                late = wanted - length + arrays[0].shape[2]
                source = np.where(wanted < self.keep, np.maximum(wanted, 0), late)
                arrays = [mx.take(a, mx.array(source), axis=2) for a in arrays]
            placed.append(arrays)
        self._arrays = [mx.concatenate(list(parts)) for parts in zip(*placed, strict=True)]

    def filter(self, rows: Sequence[int]) -> None:
        self.lengths = [self.lengths[i] for i in rows]
        room = min(self._room(0), self._columns)
        index = mx.array(list(rows))
        self._arrays = [a[:, :, :room][index] for a in self._arrays]

    def extend(self, other: _BatchCache) -> None:
        """Appends the rows of another batch."""
        like = self._arrays or other._arrays
        room = max(self._columns, other._columns)
        self._widen(room, like)
        other._widen(room, like)
        self._arrays = [
            mx.concatenate(list(pair)) for pair in zip(self._arrays, other._arrays, strict=True)
        ]
        self.lengths = [*self.lengths, *other.lengths]

    def _row(self, row: int) -> list[mx.array]:
        """Returns a copy of one row's columns that hold tokens."""
        held = min(self.lengths[row], self.max_size)
        return [mx.contiguous(a[row : row + 1, :, :held]) for a in self._arrays]

    @property
    def _columns(self) -> int:
        return self._arrays[0].shape[2] if self._arrays else 0

    def _room(self, more: int) -> int:
        """Returns the number of columns for ``more`` further tokens of each row."""
        needed = min(max(self.lengths, default=0) + more, self.max_size)
        if more and needed <= self._columns:
            return self._columns
        return min(-(-needed // _STEP) * _STEP, self.max_size)

    def _widen(self, columns: int, like: list[mx.array]) -> None:
        """Adds empty columns on the right; ``like`` are arrays of the same form."""
        if not self._arrays:
            rows = len(self.lengths)
            shapes = [(rows, a.shape[1], columns, a.shape[3]) for a in like]
            self._arrays = [mx.zeros(s, a.dtype) for s, a in zip(shapes, like, strict=True)]
        elif more := columns - self._columns:
            sides = [(0, 0), (0, 0), (0, more), (0, 0)]
            self._arrays = [mx.pad(a, sides) for a in self._arrays]

    def _counts(self) -> Tokens:
        return np.array(self.lengths, dtype=np.int32)[:, None]

    def _places(self, tokens: Tokens) -> Tokens:
        """Returns the columns of tokens."""
        ring = self.max_size - self.keep
        return np.where(tokens < self.keep, tokens, self.keep + (tokens - self.keep) % ring)

    def _tokens_at(self, lengths: Tokens, columns: int) -> Tokens:
        """Returns the tokens that the columns of rows of these lengths, shape [rows, 1], hold: the
        last of those whose place it is; -1 for none. Shape [rows, columns]."""
        ring = self.max_size - self.keep
        first = np.arange(columns, dtype=np.int32)
        rounds = np.where(first < self.keep, 0, np.maximum(lengths - 1 - first, 0) // ring)
        return np.where(first < lengths, first + rounds * ring, -1)


class BatchBoundedKVCache(_BatchCache):
    """KV cache of a batch that holds the first tokens and the last ones of each row."""

    def __init__(self, rows: int, max_size: int) -> None:
        super().__init__(rows, max_size, KEPT)

    def _stored(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        return [keys, values]

    def _fetched(self, arrays: list[mx.array]) -> tuple[mx.array, mx.array]:
        keys, values = arrays
        return keys, values

    def extract(self, row: int) -> BoundedKVCache:
        own = BoundedKVCache(self.max_size)
        if length := self.lengths[row]:
            own.keys, own.values = self._row(row)
            own.offset = length
            own._idx = int(self._places(np.array(length - 1))) + 1
        return own


class BatchQuantizedKVCache(_BatchCache):
    """Quantized KV cache of a batch. mlx-lm's attention reads ``bits`` and ``group_size``."""

    def __init__(self, rows: int, bits: int, group_size: int) -> None:
        super().__init__(rows)
        self.bits = bits
        self.group_size = group_size

    def _stored(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        self.group_size = group_size(keys, values, self.group_size)
        return [
            part
            for x in (keys, values)
            for part in mx.quantize(x, group_size=self.group_size, bits=self.bits)
        ]

    def _fetched(self, arrays: list[mx.array]) -> tuple[list[mx.array], list[mx.array]]:
        return arrays[:3], arrays[3:]

    def extract(self, row: int) -> GroupedKVCache:
        own = GroupedKVCache(self.bits, self.group_size)
        if length := self.lengths[row]:
            parts = self._row(row)
            own.keys, own.values = tuple(parts[:3]), tuple(parts[3:])
            own.offset = length
        return own


def group_size(keys: mx.array, values: mx.array, wanted: int) -> int:
    """Returns the number of values of keys and values that are quantized together: ``wanted``, or
    with 0 the largest that divides their widths.

    Raises:
        ValueError: the number does not divide the widths, or none does.
    """
    widths = (keys.shape[-1], values.shape[-1])
    for size in (wanted,) if wanted else GROUPS:
        if not any(width % size for width in widths):
            return size
    heads = " and ".join(map(str, sorted(set(widths))))
    raise ValueError(
        f"its heads have a width of {heads}, which "
        + (f"groups of {wanted} do not divide" if wanted else "no size of groups divides (64, 32)")
    )


def _ordered(cache: Any) -> list[mx.array]:
    """Returns the arrays of a single sequence's cache, in the order of its tokens; none if it is
    empty."""
    if cache.keys is None:
        return []
    if isinstance(cache, BoundedKVCache):
        return [cache._temporal_order(x) for x in (cache.keys, cache.values)]
    return [x[..., : cache.offset, :] for x in (*cache.keys, *cache.values)]


def _refuse_window(window_size: int | None) -> None:
    if window_size is not None:
        raise NotImplementedError("its layers attend to a window of their own")
