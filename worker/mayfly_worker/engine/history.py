"""Tokens that rows of a batch have seen, kept on the device: for what depends on more than how
often a row has emitted each token.

The host is a step behind the device, so it does not know a row's last token when the next is
sampled. A :class:`TokenHistory` has the tokens of each row, prompt and answer, at their positions,
and is extended by arrays that are still being computed. All its results are functions of a row's
tokens alone; a worker that continues a request makes the history from them.

DRY ("don't repeat yourself") penalizes tokens that would extend a repetition: for each position
``j`` before the last token, ``matches[j]`` is the length of the longest text that ends at ``j`` and
that the row also ends with. One more token ``x`` makes it

    matches'[j] = matches[j - 1] + 1  if tokens[j] == x, otherwise 0

and token ``tokens[j + 1]`` would extend the repetition. A repetition does not go past a *sequence
breaker*: a token, or several, whose text contains one of the request's texts, such as a line end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

CAPACITY_STEP = 256
"""Tokens by which the arrays of a history grow."""
LONGEST_MATCH = 512
"""Length, in tokens, from which repetitions count as equally long."""
MAX_PENALTY = 1e9
"""Largest penalty for a repetition. It is finite, so that a row always has a token to sample."""
_ANY = -1
_NONE = -2


@dataclass(frozen=True, eq=False)
class SequenceBreakers:
    """Token sequences at which repetitions end: a token ``id`` for which bit ``k % 32`` of
    ``heads[k // 32, id]`` is set, followed by ``tails[k]``, which may be empty."""

    tails: tuple[tuple[int, ...], ...]
    heads: NDArray[np.uint32]

    @classmethod
    def of(cls, sequences: Mapping[tuple[int, ...], Sequence[int]], width: int) -> SequenceBreakers:
        """Makes the breakers from the ids that may begin them, by the tokens that follow; ``width``
        is the number of ids."""
        heads = np.zeros((len(sequences) // 32 + 1, width), dtype=np.uint32)
        for k, ids in enumerate(sequences.values()):
            heads[k // 32, list(ids)] |= np.uint32(1 << k % 32)
        return cls(tuple(sequences), heads)

    def last_end(self, tokens: NDArray[np.int64]) -> int:
        """Returns the number of tokens up to the end of the last breaker in ``tokens``; 0 if there
        is none."""
        found = 0
        for k, tail in enumerate(self.tails):
            starts = len(tokens) - len(tail)
            if starts <= 0:
                continue
            at = self.heads[k // 32, tokens[:starts]] >> np.uint32(k % 32) & 1 == 1
            for offset, token in enumerate(tail, start=1):
                at = at & (tokens[offset : offset + starts] == token)
            if len(hits := np.flatnonzero(at)):
                found = max(found, int(hits[-1]) + 1 + len(tail))
        return found


@dataclass(frozen=True, slots=True)
class DryRow:
    """DRY's parameters for one row. Repetitions within the last ``window`` tokens of at least
    ``allowed`` tokens are penalized by ``multiplier * base ** (length - allowed)``."""

    multiplier: float
    base: float
    allowed: int
    window: int
    breakers: SequenceBreakers


@dataclass(frozen=True, slots=True)
class RowHistory:
    """History of one row: its ``tokens`` and DRY's ``matches``, shape [capacity], and ``unbroken``,
    the number of tokens since the last sequence breaker. ``prompt`` is the number of tokens before
    the row's answer."""

    tokens: mx.array
    matches: mx.array
    unbroken: mx.array
    prompt: int

    @classmethod
    def of(cls, tokens: Sequence[int], generated: int, dry: DryRow | None) -> RowHistory:
        """Makes the history of a row whose tokens are known, of which it has ``generated`` the
        last."""
        known = np.asarray(tokens, dtype=np.int64)
        room = -len(known) % CAPACITY_STEP or CAPACITY_STEP
        matches = _matches(known) if dry is not None else np.zeros_like(known)
        end = dry.breakers.last_end(known) if dry is not None else 0
        return cls(
            mx.array(np.pad(known, (0, room)).astype(np.int32)),
            mx.array(np.pad(matches, (0, room)).astype(np.int32)),
            mx.array(len(known) - end, dtype=mx.int32),
            len(known) - generated,
        )


def _matches(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns for each position the length of the longest text that ends there and that the tokens
    also end with; 0 at the last position."""
    found = np.zeros_like(tokens)
    last = len(tokens) - 1
    ends = np.arange(last)
    for length in range(LONGEST_MATCH):
        ends = ends[ends >= length]
        ends = ends[tokens[ends - length] == tokens[last - length]]
        if not len(ends):
            break
        found[ends] = length + 1
    return found


class TokenHistory:
    """Histories of the rows of a batch that need one, numbered from 0 in the order of ``rows``.

    ``dry`` has the parameters of the rows that use DRY, by their numbers; ``banned`` the token
    sequences that a row must not generate.
    """

    def __init__(
        self,
        rows: Sequence[RowHistory],
        width: int,
        dry: dict[int, DryRow],
        banned: Sequence[tuple[int, tuple[int, ...]]],
    ) -> None:
        self._width = width
        self._prompts = [row.prompt for row in rows]
        capacity = max(row.tokens.size for row in rows)
        self._tokens = mx.stack([_padded(row.tokens, capacity) for row in rows])
        self._matches = mx.stack([_padded(row.matches, capacity) for row in rows])
        self._unbroken = mx.stack([row.unbroken for row in rows])
        self._dry = dry
        if dry:
            self._build_dry()
        self._banned = banned
        if banned:
            self._banned_rows = mx.array([row for row, _ in banned])
            self._banned_last = mx.array([sequence[-1] for _, sequence in banned])
            self._banned_before = _reversed([sequence[:-1] for _, sequence in banned])

    def _build_dry(self) -> None:
        rows = list(self._dry.values())
        self._dry_rows = mx.array(list(self._dry))
        self._multiplier = mx.array([[row.multiplier] for row in rows])
        self._base = mx.array([[row.base] for row in rows])
        self._allowed = mx.array([[row.allowed] for row in rows])
        self._window = mx.array([[row.window] for row in rows])
        sets = list(dict.fromkeys(row.breakers for row in rows))
        self._breakers = mx.array([sets.index(row.breakers) for row in rows])
        most = max(1, *(len(each.tails) for each in sets))
        heads = np.zeros((len(sets), most // 32 + 1, self._width), dtype=np.uint32)
        tails: list[tuple[int, ...]] = []
        for words, each in zip(heads, sets, strict=True):
            words[: len(each.heads)] = each.heads
            tails += [*each.tails, *[()] * (most - len(each.tails))]
        self._heads = mx.array(heads)
        self._tail_lengths = mx.array([len(tail) for tail in tails]).reshape(len(sets), most)
        self._tails = _reversed(tails).reshape(len(sets), most, -1)
        self._tail_numbers = mx.arange(most)

    def row(self, number: int) -> RowHistory:
        """The history of one row, for the next batch that it is in."""
        return RowHistory(
            self._tokens[number],
            self._matches[number],
            self._unbroken[number],
            self._prompts[number],
        )

    def _lengths(self, positions: Sequence[int]) -> mx.array:
        """Numbers of tokens that the rows have, shape [rows, 1]; ``positions`` are those of the
        next tokens in their answers."""
        return mx.array(
            [[prompt + at] for prompt, at in zip(self._prompts, positions, strict=True)]
        )

    def counts(
        self, rows: Sequence[int], windows: Sequence[int], positions: Sequence[int]
    ) -> mx.array:
        """Counts how often each token is among the last ``windows`` tokens of the ``rows``, shape
        [rows, width]."""
        index = mx.array(list(rows))
        tokens, lengths = self._tokens[index], self._lengths(positions)[index]
        at = mx.arange(tokens.shape[1])
        inside = (at < lengths) & (at >= lengths - mx.array([[window] for window in windows]))
        counts = mx.zeros((len(rows), self._width))
        return counts.at[mx.arange(len(rows))[:, None], tokens].add(inside.astype(mx.float32))

    def repetition_penalties(self, positions: Sequence[int]) -> mx.array:
        """Penalty of each token that would extend a repetition, shape [rows with DRY, width]."""
        rows = self._dry_rows
        lengths = self._lengths(positions)[rows]
        at = mx.arange(self._tokens.shape[1])
        start = mx.maximum(lengths - self._window, 0)
        inside = (at >= start) & (at < lengths - 1)
        bound = mx.minimum(at - start + 1, self._unbroken[rows][:, None])
        matches = mx.minimum(self._matches[rows], bound)
        exponents = (matches - self._allowed).astype(mx.float32)
        penalties = mx.minimum(self._multiplier * mx.power(self._base, exponents), MAX_PENALTY)
        penalties = mx.where(inside & (matches >= self._allowed), penalties, 0.0)
        following = _shifted(self._tokens[rows], -1)
        none = mx.zeros((len(self._dry), self._width))
        return none.at[mx.arange(len(self._dry))[:, None], following].maximum(penalties)

    def forbid_words(self, logits: mx.array, rows: mx.array, positions: Sequence[int]) -> mx.array:
        """Returns ``logits`` with -inf for the last token of each banned sequence whose other
        tokens a row has just generated. ``rows`` are the batch's numbers of this history's rows."""
        index, before = self._banned_rows, self._banned_before
        seen = self._recent(index, positions, before.shape[1])
        equal = mx.all((before == _ANY) | (before == seen), axis=-1)
        generated = [positions[row] >= len(sequence) - 1 for row, sequence in self._banned]
        ban = mx.where(equal & mx.array(generated), -mx.inf, mx.inf)
        return logits.at[rows[index], self._banned_last].minimum(ban)

    def _recent(self, index: mx.array, positions: Sequence[int], count: int) -> mx.array:
        """The last ``count`` tokens of the rows ``index``, the last one first."""
        at = self._lengths(positions)[index] - 1 - mx.arange(count)
        tokens = mx.take_along_axis(self._tokens[index], mx.maximum(at, 0), axis=1)
        return mx.where(at >= 0, tokens, _NONE)

    def extend(self, sampled: mx.array, positions: Sequence[int]) -> None:
        """Appends the ``sampled`` tokens, one for each row, at ``positions`` of their answers."""
        capacity = self._tokens.shape[1]
        if max(map(sum, zip(self._prompts, positions, strict=True))) + 1 >= capacity:
            self._tokens = _padded(self._tokens, capacity + CAPACITY_STEP)
            self._matches = _padded(self._matches, capacity + CAPACITY_STEP)
        sampled = sampled.astype(mx.int32)[:, None]
        lengths = self._lengths(positions)
        at = mx.arange(self._tokens.shape[1])
        before = self._tokens
        self._tokens = mx.where(at == lengths, sampled, before)
        if not self._dry:
            return
        longer = mx.minimum(_shifted(self._matches, 1) + 1, LONGEST_MATCH)
        self._matches = mx.where((before == sampled) & (at < lengths), longer, 0)
        rows = self._dry_rows
        broken = self._ends_with_breaker([position + 1 for position in positions])
        self._unbroken[rows] = mx.where(broken, 0, self._unbroken[rows] + 1)

    def _ends_with_breaker(self, positions: Sequence[int]) -> mx.array:
        """True for each row with DRY whose tokens end with a sequence breaker."""
        sets, numbers = self._breakers, self._tail_numbers
        tails = self._tails[sets]
        recent = self._recent(self._dry_rows, positions, tails.shape[2] + 1)
        equal = mx.all((tails == _ANY) | (tails == recent[:, None, :-1]), axis=-1)
        head = mx.take_along_axis(recent, self._tail_lengths[sets], axis=1)
        words = self._heads[sets[:, None], numbers >> 5, mx.maximum(head, 0)]
        known = (words >> (numbers & 31).astype(mx.uint32)) & 1 == 1
        return mx.any(equal & known & (head >= 0), axis=1)


def _padded(values: mx.array, capacity: int) -> mx.array:
    missing = capacity - values.shape[-1]
    return mx.pad(values, [*[(0, 0)] * (values.ndim - 1), (0, missing)]) if missing else values


def _shifted(values: mx.array, by: int) -> mx.array:
    """Moves each row's values by one place to the right (1) or left (-1), with a 0 in the gap."""
    zero = mx.zeros((values.shape[0], 1), dtype=values.dtype)
    parts = [zero, values[:, :-1]] if by > 0 else [values[:, 1:], zero]
    return mx.concatenate(parts, axis=1)


def _reversed(sequences: Sequence[Sequence[int]]) -> mx.array:
    """Token sequences of unequal length as rows of one array, the last token first and padded."""
    width = max(1, max(map(len, sequences)))
    rows = [[*reversed(each), *[_ANY] * (width - len(each))] for each in sequences]
    return mx.array(rows, dtype=mx.int32)
