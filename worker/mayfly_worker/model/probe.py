"""Probe of a model before it serves: length of a row of logits, KV cost, batching and padding.

A few tokens are run through the model to learn these properties, because its code does not state
them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mayfly_worker.engine import caches
from mayfly_worker.engine.prefill import PrefillGroup, Prompt
from mayfly_worker.engine.sampler import SequenceSampling
from mayfly_worker.engine.sequence import SequenceState
from mayfly_worker.model.reference_store import ReferenceStore
from mayfly_worker.prefix_cache.layers import leaves

_CHUNK = 512
"""Tokens of a test prompt that are prefilled at once."""
_LEAST = 7
_USUAL = 64
_LONGEST = 4608
"""Lengths of the longest test prompt: the least that is of use, the least where it costs little,
and the largest. It exceeds the windows and the numbers of chosen tokens (2,048 in DeepSeek's sparse
attention) of the models that mlx-lm knows, but for some of 8,192."""
_CPU_BYTES = 4e9
"""Bytes that a CPU is asked to read for the longest test prompt, each token of which reads all
weights: a second's work. Larger models get a shorter prompt there."""
_ATTEMPTS = 3
"""Number of different sets of prompts with which decoding in a batch has to fail. In 16 bits a
right model of experts may choose another expert by rounding alone, in one of them."""
UNABLE = (ValueError, TypeError, AttributeError, IndexError, KeyError, NotImplementedError)
"""Exceptions by which a model or its cache shows that it cannot run a prompt, or a batch. (MLX
reports shapes that do not fit as ValueError, and faults of the device as RuntimeError.)"""
_UNCUT = ("phi3small",)
"""Model types whose tokens depend on where a prompt is cut: mlx-lm counts the blocks of their
sparse attention from the end of each chunk. (They are named because comparing tells in float32
alone: in 16 bits, cutting a prompt moves the logits of other models, too.)"""
_SHORT = [9, 6, 8, 5, 3, 9, 4, 2, 7]
_SHORT_LENGTHS = (1, 2, 3, 5, 9)
"""Lengths of the short test prompts: nothing, less and more is prefilled than a convolution reads,
and what the first of them leave in a cache may be less than a longer prompt leaves."""
_NEXT = 7
_PADDING = 5
"""Difference in length of the two longest test prompts: not a multiple of any size of blocks."""
_TOLERANCE = 0.2
_TOLERANCE_FLOAT32 = 0.02
"""Largest difference, in standard deviations of the logits, that the padding of a prompt or other
sequences in a batch may make to a sequence's logits in a model that honours the padding mask. In
float32 they were seen to move logits by 1e-5 where a model honours the mask, and by 0.17 to several
standard deviations where a model ignores it. In bfloat16 on a GPU, rounding alone was seen to move
them by 0.06 to 1.4."""
_ROUNDING = 2
"""Largest difference that a batch may make beyond the tolerance, as a multiple of the one that the
order of computation makes to prompts that run alone."""
_CHUNKS = 16
"""Number of chunks in which a prompt is prefilled to find out what the order of computation makes.
On an H200 that was 0.07 to 2.2 standard deviations, where batches made 0.06 to 1.4, and equal
batches without any padding as much as ragged ones."""
_LEAST_CHUNK = 7


@dataclass(frozen=True, slots=True)
class KVCost:
    """Bytes of a sequence's KV cache: ``per_token`` for each token (layers that grow), and
    ``per_row`` whatever the length (state-space layers, and layers with a window, which is counted
    whole)."""

    per_token: int
    per_row: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Properties of a model that were found by running a few tokens through it.

    ``width`` is the length of a row of logits, which may exceed the tokenizer's vocabulary.
    ``batchable``: sequences may decode together; otherwise ``unbatchable_because`` says why not.
    ``padding_safe``: prompts of different lengths may be prefilled together (some state-space
    models ignore the padding mask). ``mixed_states``: a sequence that has just begun may decode
    together with others (some models take the zeros that stand for its state in a batch for
    another state than none). ``cuttable``: a prompt may be prefilled in chunks, some of which are
    another request's.
    """

    width: int
    cost: KVCost
    batchable: bool
    padding_safe: bool
    mixed_states: bool = True
    cuttable: bool = True
    unbatchable_because: str = ""


def probe(model: Any, new_cache: caches.Factory, references: ReferenceStore) -> Probe:
    """Finds a model's properties by running a few tokens through it. The tests of batching and
    padding are left out if ``references`` (stored results of earlier workers) have their
    results.

    Raises:
        Exception: the model's code cannot run a prompt.
    """
    cache = new_cache()
    logits = model(mx.array([_SHORT]), cache=cache)
    width = logits.shape[-1]
    tolerance = _TOLERANCE_FLOAT32 if logits.dtype == mx.float32 else _TOLERANCE
    batches = [
        _Batches(model, new_cache, _prompts(model, cache, width, attempt), tolerance)
        for attempt in range(_ATTEMPTS)
    ]
    because = why_unbatchable(cache)
    mixed = False
    if not because:
        because = _reason("batching", _Batches.decode, batches, references)
        mixed = not because
        if because and caches.state_shapes(cache):
            because = _reason("batching of like states", _Batches.decode_alike, batches, references)
    return Probe(
        width=width,
        cost=_cost(cache),
        batchable=not because,
        padding_safe=mixed and not _reason("padding", _Batches.prefill, batches[:1], references),
        mixed_states=mixed,
        cuttable=getattr(model, "model_type", "") not in _UNCUT,
        unbatchable_because=because,
    )


def why_unbatchable(cache: caches.Cache) -> str:
    """Returns why sequences with KV caches of this type cannot decode together; an empty text if
    their type allows it."""
    for layer in leaves(cache):
        if not hasattr(layer, "merge"):
            return f"mlx-lm cannot batch caches of the class {type(layer).__name__}"
    return ""


def bounded_as_unbounded(model: Any, new_cache: caches.Factory) -> bool:
    """True if the model's logits are the same with bounded caches, which ``new_cache`` makes, as
    with its own, while a sequence is short enough that nothing is dropped."""
    last = []
    for make in (new_cache, caches.factory(model)):
        cache = make()
        try:
            for tokens in (_SHORT, _SHORT, [_NEXT], [_NEXT]):
                logits = model(mx.array([tokens]), cache=cache)[:, -1, :].astype(mx.float32)
        except UNABLE:
            return False
        last.append(logits)
    bounded, own = last
    return bool((mx.max(mx.abs(bounded - own)) <= _TOLERANCE * mx.std(own)).item())


def kv_cost(model: Any, new_cache: caches.Factory) -> KVCost:
    """Returns the bytes of KV cache per token and per sequence, of a model whose weights are not
    loaded.

    A forward pass is built but not computed, which is enough to know each array's shape and type.
    """
    cache = new_cache()
    model(mx.array([_SHORT]), cache=cache)
    return _cost(cache)


def _cost(cache: caches.Cache) -> KVCost:
    per_token = per_row = 0
    for layer in leaves(cache):
        grows = getattr(layer, "keys", None) is not None
        window = getattr(layer, "max_size", None)
        for array in _flat(layer.state):
            if grows and array.ndim == 4:
                bytes_a_token = array.nbytes // array.shape[2]
                per_token += 0 if window else bytes_a_token
                per_row += bytes_a_token * (window or 0)
            else:
                per_row += array.nbytes
    return KVCost(per_token, per_row)


def _flat(state: Any) -> Iterator[mx.array]:
    if isinstance(state, mx.array):
        yield state
    elif isinstance(state, (list, tuple)):
        for item in state:
            yield from _flat(item)


def _reason(name: str, test: _Test, batches: list[_Batches], references: ReferenceStore) -> str:
    """Returns why a test fails with each of these sets of prompts; empty if it succeeds with one.

    Only a positive result is stored for later workers: a negative result may come from a faulty
    device.
    """
    question = (name, batches[0].prompts, batches[0].tolerance)
    if references.known(question):
        return ""
    because = ""
    for attempt in batches:
        because = test(attempt)
        if not because:
            references.store(question, True)
            break
    return because


class _Batches:
    """Test prompts of a model, which run together and alone. The tests return why the logits are
    not those that each prompt has alone; empty if they are, up to a tolerance or to what rounding
    makes of them."""

    def __init__(
        self,
        model: Any,
        new_cache: caches.Factory,
        prompts: list[list[int]],
        tolerance: float,
    ) -> None:
        self._model = model
        self._new_cache = new_cache
        self.prompts = prompts
        self.tolerance = tolerance

    def decode(self) -> str:
        """Tests prompts that are prefilled one at a time and decode together."""
        return self._decode(list(range(len(self.prompts))))

    def decode_alike(self) -> str:
        """Tests prompts that decode together only if they leave states of the same shapes in a
        cache; each is in a batch twice."""
        alike: list[tuple[Any, list[int]]] = []
        for i in range(len(self.prompts)):
            shapes = caches.state_shapes(self._prefilled([i]).take(0))
            found = next((chosen for known, chosen in alike if known == shapes), None)
            if found is None:
                alike.append((shapes, [i, i]))
            else:
                found.append(i)
        return next((why for _, chosen in alike if (why := self._decode(chosen))), "")

    def _decode(self, chosen: list[int]) -> str:
        def batch() -> caches.Cache:
            joined: caches.Cache = []
            for i in chosen:
                joined = caches.extend(joined, self._prefilled([i]).split([0]))
            return joined

        return self._differs(chosen, batch)

    def prefill(self) -> str:
        """Tests prompts that are prefilled together, too: two long ones and a short one, and short
        ones. (A prompt of one token is never prefilled.)"""
        chosen = [i for i, prompt in enumerate(self.prompts) if len(prompt) > 1]
        return self._prefill(chosen[:3]) or (self._prefill(chosen[2:]) if chosen[3:] else "")

    def _prefill(self, chosen: list[int]) -> str:
        return self._differs(
            chosen, lambda: self._prefilled(chosen).split(list(range(len(chosen))))
        )

    def _differs(self, chosen: list[int], batch: Callable[[], caches.Cache]) -> str:
        alone = mx.concatenate([self._alone[i] for i in chosen])
        try:
            together = self._decoded(chosen, batch())
            mx.eval(together)
        except UNABLE as error:
            return f"a batch raised {type(error).__name__}: {error}"
        worst = mx.max(mx.abs(together - alone))
        if (worst <= self.tolerance * mx.std(alone)).item():
            return ""
        if (worst <= _ROUNDING * self._rounding).item():
            return ""
        return "sequences decode to other tokens in a batch than alone"

    @cached_property
    def _alone(self) -> list[mx.array]:
        rows = []
        for i in range(len(self.prompts)):
            rows.append(self._decoded([i], self._prefilled([i]).take(0)))
            mx.eval(rows)
        return rows

    @cached_property
    def _rounding(self) -> mx.array:
        """Largest difference that another order of computation makes to the logits of the long
        prompts when they run alone: they are prefilled in smaller chunks. Rounding makes it, as it
        makes a part of the difference between a batch and prompts alone. (In small chunks, short
        prompts are prefilled as in large ones.)"""
        found = mx.array(0.0)
        for i, alone in enumerate(self._alone[:2]):
            chunk = max(_LEAST_CHUNK, len(self.prompts[i]) // _CHUNKS)
            again = self._decoded([i], self._prefilled([i], chunk).take(0))
            found = mx.maximum(found, mx.max(mx.abs(again - alone)))
            mx.eval(found)
        return found

    def _prefilled(self, chosen: list[int], chunk: int = _CHUNK) -> PrefillGroup:
        """Returns prompts as a group that is prefilled, but for the last token of each."""
        rows = [SequenceState(i, self.prompts[i], SequenceSampling.greedy(), 1) for i in chosen]
        group = PrefillGroup(
            self._model,
            [Prompt("", row, 0, [], []) for row in rows],
            [self._new_cache() for _ in rows],
        )
        while group.left:
            group.feed(chunk)
        return group

    def _decoded(self, chosen: list[int], cache: caches.Cache) -> mx.array:
        """Returns the logits after the last token of each prompt and after one token more, shape
        [prompts, 2 x width] (a lazy array)."""
        steps = [
            self._model(mx.array(tokens), cache=cache)[:, -1, :]
            for tokens in ([self.prompts[i][-1:] for i in chosen], [[_NEXT]] * len(chosen))
        ]
        return mx.concatenate(steps, axis=-1).astype(mx.float32)


_Test = Callable[[_Batches], str]


def _prompts(model: Any, cache: caches.Cache, width: int, attempt: int) -> list[list[int]]:
    """Returns test prompts: two long ones of different lengths, whose windows and blocks begin at
    different places of a batch; and short ones, the shortest of which joins with an empty cache."""
    some = min(width, 997)
    long = [(7 * i + 3 + attempt) % some for i in range(_reach(model, cache))]
    shorter = [(5 * i + 4 + attempt) % some for i in range(len(long) - _PADDING)]
    short = [_SHORT[:n] for n in _SHORT_LENGTHS if n == 1 or n < len(shorter)]
    return [long, shorter, *short]


def _reach(model: Any, cache: caches.Cache) -> int:
    """Returns the length of a prompt, in tokens, that exceeds the model's windows and the tokens or
    blocks that its sparse attention chooses, as far as a test can afford such a length."""
    lengths = [_USUAL]
    for layer in leaves(cache):
        lengths += [getattr(layer, name, None) or 0 for name in ("max_size", "chunk_size")]
    for module in model.modules() if hasattr(model, "modules") else []:
        numbers = {name: n for name, n in vars(module).items() if type(n) is int}
        block = max((n for name, n in numbers.items() if "block_size" in name), default=1)
        lengths += [n * block for name, n in numbers.items() if re.search("top_?k", name)]
        lengths += [n for name, n in numbers.items() if "window" in name]
    most = _LONGEST
    if not (mx.metal.is_available() or mx.cuda.is_available()):
        weights: list[Any] = tree_flatten(model.parameters())  # type: ignore[assignment]
        most = min(most, int(_CPU_BYTES / max(1, sum(array.nbytes for _, array in weights))))
    return max(_LEAST, min(max(lengths) + _LEAST + _PADDING, most))
