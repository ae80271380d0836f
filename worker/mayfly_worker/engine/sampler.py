"""One batched sampler for all sequences that decode.

A token is sampled by the Gumbel-max trick: the argmax of ``logits / temperature`` plus Gumbel noise
(Gumbel 1954; see Huijben et al., "A review of the Gumbel-max trick", 2022), which is a draw from
the softmax. Where the logits of a resumed or batched run differ in their last bits, the argmax
almost never differs, while an inverse-CDF draw often would differ.

The order of operations on a row's logits is

    model -> penalties -> DRY -> bias -> bans -> grammar -> / temperature -> filters -> XTC
          -> + noise

and no row's result depends on another row: an operation that is off for a row is either not
computed for it or is exactly the identity. Bans are end tokens before ``min_tokens``, all ids but
the allowed ones, and bad words. Filters follow the common order: top-n-sigma, top-k, locally
typical (Meister et al., "Locally typical sampling", 2023), then top-p over the remaining tokens,
and min-p relative to the most likely of them. Most become one threshold that needs a single sort;
tokens tied with a threshold are kept. XTC leaves out the likeliest of the tokens whose probability
is above its threshold, all but the least likely of them; as elsewhere, this probability is that
before the temperature. Greedy rows take the likeliest token after the bans, whatever their filters
are.

The noise of a token is keyed by (seed, choice, position) alone, and so is the draw that decides
whether XTC applies, which is made on the host: the same request samples the same tokens alone, in
any batch, and when another worker continues it after a fault. The 64-bit keys are the outputs of
SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), a
generator whose n-th output can be computed directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mayfly_protocol.requests import Sampling
from mayfly_worker.engine.filters import NEVER, Filters, Xtc
from mayfly_worker.engine.history import DryRow, RowHistory, SequenceBreakers, TokenHistory

_STEP = 0x9E3779B97F4A7C15
_GOLDEN = np.uint64(_STEP)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def _finalize(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def stream_of(seed: int, choice: int) -> int:
    """Returns the 64-bit random state of one choice of a request, from which the random keys of all
    its tokens are derived."""
    start = (seed + choice * _STEP) & _MASK
    return int(_finalize(np.array([start], dtype=np.uint64))[0])


def keys_at(streams: NDArray[np.uint64], positions: Sequence[int]) -> NDArray[np.uint32]:
    """Returns an MLX random key for each row, shape [rows, 2]: the key of the token at the row's
    position in its answer, from the random state of the row's choice in ``streams`` (see
    :func:`stream_of`)."""
    counters = np.asarray(positions, dtype=np.uint64) + np.uint64(1)
    return _finalize(streams + counters * _GOLDEN).view(np.uint32).reshape(-1, 2)


def draws_at(streams: NDArray[np.uint64], positions: Sequence[int]) -> NDArray[np.float64]:
    """Returns a random number in [0, 1) for each row, apart from the noise of :func:`keys_at`."""
    keys = keys_at(streams, positions).view(np.uint64).ravel()
    return (_finalize(keys ^ _GOLDEN) >> np.uint64(11)).astype(np.float64) * 2.0**-53


_ALL = 2**31 - 1
"""Window that holds all tokens of a sequence."""


@dataclass(frozen=True, slots=True)
class SequenceSampling:
    """Sampling parameters of one sequence.

    ``choice`` is the sequence's index among the choices of its request, and gives each choice
    random numbers of its own. ``banned`` are the ids of end tokens: they cannot be sampled before
    position ``banned_until`` of the answer, which is the request's ``min_tokens``. ``bad_words``
    are the token sequences of the request's bad words, ``breakers`` those of DRY's sequence
    breakers; XTC never leaves out the tokens ``kept_by_xtc``.
    """

    sampling: Sampling
    choice: int = 0
    banned: tuple[int, ...] = ()
    banned_until: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    breakers: SequenceBreakers | None = None
    kept_by_xtc: tuple[int, ...] = ()

    @classmethod
    def greedy(cls) -> SequenceSampling:
        return cls(Sampling(seed=0, temperature=0.0))

    @property
    def penalised(self) -> bool:
        s = self.sampling
        return (
            s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0
        )

    @property
    def filtered(self) -> bool:
        s = self.sampling
        return s.temperature > 0 and (
            s.top_p < 1.0
            or s.top_k > 0
            or s.min_p > 0.0
            or s.typical_p < 1.0
            or s.top_n_sigma > 0.0
        )

    @property
    def draws_xtc(self) -> bool:
        return self.sampling.temperature > 0 and self.sampling.xtc_probability > 0

    @property
    def windows(self) -> tuple[int | None, int | None, int | None]:
        """Numbers of last tokens that the repetition, presence and frequency penalties count; None:
        the whole output."""
        s = self.sampling
        return (s.repetition_window, s.presence_window, s.frequency_window)

    @property
    def dry(self) -> DryRow | None:
        dry = self.sampling.dry
        if dry is None or self.breakers is None:
            return None
        window = _ALL if dry.window is None else dry.window
        return DryRow(dry.multiplier, dry.base, dry.allowed_length, window, self.breakers)

    @property
    def has_history(self) -> bool:
        windowed = self.penalised and any(window is not None for window in self.windows)
        return windowed or bool(self.bad_words) or self.dry is not None


@dataclass(frozen=True, slots=True)
class RowMemory:
    """State of one row that depends on its tokens: how often it has emitted each token, shape
    [width], if it has penalties, and its history, if it needs one."""

    counts: mx.array | None = None
    history: RowHistory | None = None

    @classmethod
    def of(
        cls, row: SequenceSampling, tokens: Sequence[int], generated: int, width: int
    ) -> RowMemory:
        """Makes the state of a row from its tokens, of which it has ``generated`` the last."""
        counts = None
        if row.penalised and generated:
            counted = np.bincount(tokens[-generated:], minlength=width)[:width]
            counts = mx.array(counted, dtype=mx.float32)
        history = RowHistory.of(tokens, generated, row.dry) if row.has_history else None
        return cls(counts, history)


class Sampler:
    """Samples one token for each row of a batch. A new sampler is built whenever rows join or leave
    the batch.

    A sampler keeps what depends on a row's tokens; the next sampler is given this state of each row
    (see :meth:`memory_of`). Without it, a row begins with no tokens. ``width`` is the length of a
    row of logits.
    """

    def __init__(
        self,
        rows: Sequence[SequenceSampling],
        width: int,
        memories: Sequence[RowMemory] | None = None,
    ) -> None:
        known = memories or [RowMemory.of(row, (), 0, width) for row in rows]
        self._rows = rows
        self._width = width
        self._streams = np.array(
            [stream_of(r.sampling.seed, r.choice) for r in rows], dtype=np.uint64
        )
        temperatures = [r.sampling.temperature for r in rows]
        self._all_greedy = all(t == 0 for t in temperatures)
        self._all_sampled = all(t > 0 for t in temperatures)
        self._is_sampled = mx.array([[t > 0] for t in temperatures])
        self._scale = mx.array([[t if t > 0 else 1.0 for t in temperatures]]).T

        self._penalised = [i for i, r in enumerate(rows) if r.penalised]
        if self._penalised:
            self._build_penalties([memory.counts for memory in known])
        filtered = [(i, r.sampling) for i, r in enumerate(rows) if r.filtered]
        self._filters = Filters(filtered, len(rows), width) if filtered else None
        drawing = [(i, r.sampling, r.kept_by_xtc) for i, r in enumerate(rows) if r.draws_xtc]
        self._xtc = Xtc(drawing, width) if drawing else None
        self._build_bias()
        self._banning = [i for i, r in enumerate(rows) if r.banned and r.banned_until > 0]
        self._build_allowed()
        self._remembering = [i for i, r in enumerate(rows) if r.has_history]
        if self._remembering:
            self._build_history([known[i].history for i in self._remembering])
        touched = (
            self._penalised
            or self._bias is not None
            or self._banning
            or self._allowing
            or self._remembering
        )
        self._plain_argmax = self._all_greedy and not touched

    def _build_penalties(self, counts: Sequence[mx.array | None]) -> None:
        chosen = [self._rows[i].sampling for i in self._penalised]
        self._penalised_index = mx.array(self._penalised)
        self._repetition = mx.array([[s.repetition_penalty] for s in chosen])
        self._presence = mx.array([[s.presence_penalty] for s in chosen])
        self._frequency = mx.array([[s.frequency_penalty] for s in chosen])
        none = mx.zeros((self._width,))
        self._counts = mx.stack([none if (c := counts[i]) is None else c for i in self._penalised])

    def _build_bias(self) -> None:
        triples = [(i, t, b) for i, r in enumerate(self._rows) for t, b in r.sampling.logit_bias]
        self._bias = (
            tuple(mx.array(list(column)) for column in zip(*triples, strict=True))
            if triples
            else None
        )

    def _build_allowed(self) -> None:
        self._allowing = [i for i, r in enumerate(self._rows) if r.sampling.allowed_ids]
        if self._allowing:
            only = np.zeros((len(self._allowing), self._width), dtype=np.bool_)
            for mask, i in zip(only, self._allowing, strict=True):
                mask[list(self._rows[i].sampling.allowed_ids)] = True
            self._allowed_index, self._allowed = mx.array(self._allowing), mx.array(only)

    def _build_history(self, histories: Sequence[RowHistory | None]) -> None:
        rows = [self._rows[i] for i in self._remembering]
        self._history_index = mx.array(self._remembering)
        self._history = TokenHistory(
            [h or RowHistory.of((), 0, r.dry) for h, r in zip(histories, rows, strict=True)],
            self._width,
            {number: dry for number, row in enumerate(rows) if (dry := row.dry) is not None},
            [(number, word) for number, row in enumerate(rows) for word in row.bad_words],
        )
        self._dry_index = mx.array([i for i in self._remembering if self._rows[i].dry is not None])
        self._has_dry = self._dry_index.size > 0
        self._has_bad_words = any(row.bad_words for row in rows)
        self._windowed = [
            [
                (k, self._remembering.index(i), window)
                for k, i in enumerate(self._penalised)
                if (window := self._rows[i].windows[penalty]) is not None
            ]
            for penalty in range(3)
        ]

    def memory_of(self, row: int) -> RowMemory:
        """Returns the state of a row that depends on its tokens."""
        return RowMemory(
            self._counts[self._penalised.index(row)] if row in self._penalised else None,
            self._history.row(self._remembering.index(row)) if row in self._remembering else None,
        )

    def __call__(
        self, logits: mx.array, positions: Sequence[int], allowed: mx.array | None = None
    ) -> mx.array:
        """Samples token ids, shape [rows], from logits of shape [rows, width].

        ``positions`` are the tokens' places in their answers, from 0; ``allowed`` is a boolean
        mask, shape [rows, width], of the ids that grammars permit.
        """
        if self._plain_argmax and allowed is None:
            return mx.argmax(
                logits, axis=-1
            )  # in the model's own type, whose order float32 would keep
        logits = logits.astype(mx.float32)
        places = [positions[i] for i in self._remembering]
        if self._penalised:
            logits = self._penalise(logits, places)
        if self._remembering and self._has_dry:
            penalties = self._history.repetition_penalties(places)
            logits = logits.at[self._dry_index].add(-penalties)
        if self._bias is not None:
            rows, ids, bias = self._bias
            logits = logits.at[rows, ids].add(bias)
        logits = self._ban(logits, positions)
        if self._allowing:
            index = self._allowed_index
            logits[index] = mx.where(self._allowed, logits[index], NEVER)
        if self._remembering and self._has_bad_words:
            logits = self._history.forbid_words(logits, self._history_index, places)
        if allowed is not None:
            logits = mx.where(allowed, logits, NEVER)
        tokens = mx.argmax(
            logits if self._all_greedy else self._add_noise(logits, positions), axis=-1
        )
        if self._penalised:
            sampled = tokens[self._penalised_index]
            self._counts = self._counts.at[mx.arange(len(self._penalised)), sampled].add(1.0)
        if self._remembering:
            self._history.extend(tokens[self._history_index], places)
        return tokens

    def _penalise(self, logits: mx.array, places: Sequence[int]) -> mx.array:
        index = self._penalised_index
        x = logits[index]
        repetition, presence, frequency = self._counted(places)
        seen = repetition > 0
        x = mx.where(seen, mx.where(x > 0, x / self._repetition, x * self._repetition), x)
        seen = seen if presence is repetition else presence > 0
        x = x - self._frequency * frequency - self._presence * seen
        logits[index] = x
        return logits

    def _counted(self, places: Sequence[int]) -> list[mx.array]:
        """Counts of tokens, shape [rows with penalties, width], for the repetition, presence and
        frequency penalties."""
        if not self._remembering or not any(self._windowed):
            return [self._counts] * 3
        found: list[mx.array] = []
        for penalty, rows in enumerate(self._windowed):
            if rows in self._windowed[:penalty]:
                found.append(found[self._windowed.index(rows)])
                continue
            counts = mx.array(self._counts)
            if rows:
                at, numbers, windows = zip(*rows, strict=True)
                counts[mx.array(at)] = self._history.counts(numbers, windows, places)
            found.append(counts)
        return found

    def _ban(self, logits: mx.array, positions: Sequence[int]) -> mx.array:
        pairs = [
            (i, token)
            for i in self._banning
            if positions[i] < self._rows[i].banned_until
            for token in self._rows[i].banned
        ]
        if not pairs:
            return logits
        rows, ids = zip(*pairs, strict=True)
        logits[mx.array(rows), mx.array(ids)] = NEVER
        return logits

    def _add_noise(self, logits: mx.array, positions: Sequence[int]) -> mx.array:
        keys = mx.array(keys_at(self._streams, positions))
        scaled = logits / self._scale
        if self._filters is not None:
            scaled = self._filters(scaled)
        if self._xtc is not None:
            draws = draws_at(self._streams, positions)
            scaled = self._xtc(scaled, draws)
        noisy = scaled + _gumbel(keys, self._width)
        return noisy if self._all_sampled else mx.where(self._is_sampled, noisy, logits)


def _gumbel(keys: mx.array, width: int) -> mx.array:
    """Returns Gumbel noise, shape [rows, width]; the noise of a row depends on the row's key
    alone."""
    return mx.vmap(lambda key: mx.random.gumbel((width,), key=key))(keys)


def healthy(logits: mx.array) -> mx.array:
    """Returns a boolean for each row, shape [rows]: False if the row's logits contain NaN or are
    all equal, as they are after a kernel that silently did nothing."""
    return mx.max(logits, axis=-1) > mx.min(logits, axis=-1)  # NaN is greater than nothing
