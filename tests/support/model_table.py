"""Judges how Mayfly serves a model module of mlx-lm: its engine's tokens beside mlx-lm's own.

A tiny model of the module (:mod:`support.models.configurations`) is loaded twice, by mlx-lm and as
a worker does it. The engine's greedy tokens have to be mlx-lm's, whatever runs beside a prompt, and
wherever it is cut: alone, in batches that others join, as several choices, after prompts that share
a beginning, continued by a new engine, and prefilled in small chunks.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model
from structlog.testing import capture_logs

from mayfly_protocol.settings import WorkerSettings
from mayfly_worker.model.loading import LoadedModel, load
from mayfly_worker.model.weight_files import ModelLoadError
from mayfly_worker.prefix_cache.layers import leaves
from support.engine_harness import EngineHarness, EngineRequest, FixedChunks
from support.models import tiny
from support.models.configurations import configuration

Outcome = Literal["same", "one row", "refused", "DIFFERS", "ERROR"]

TOKENS = 12
"""Tokens of each answer."""
LENGTHS = (1, 2, 7, 40, 75, 130)
"""Lengths of prompts in tokens: the last exceed every window, block and top-k of the table of
configurations."""
_SAID = (
    "the model runs one sequence at a time",
    "sequences that begin with a token or two are decoded apart from longer ones",
)
"""Log lines of a worker's start whose reasons belong in the table."""
_CACHED_AT = {"any_length": "any length", "stored_lengths": "boundaries", "none": "nowhere"}
_VARIETY = 20
"""Fewest different tokens in the answers to all of ``LENGTHS``, for the comparison to mean
something."""
_CUTS = (1, 5, 11)
"""Numbers of tokens after which another engine continues an answer."""
_TIE = 1e-3
"""Difference of two logits, in standard deviations, up to which either token counts as the
greedy one: rounding decides between them."""


@dataclass(frozen=True)
class Verdict:
    """Judgement of one module. ``says`` is what the worker says at start, or what went wrong."""

    module: str
    outcome: Outcome
    caches: str = ""
    prefixes: str = ""
    padding: str = ""
    says: str = ""

    @property
    def right(self) -> bool:
        return self.outcome not in ("DIFFERS", "ERROR")


def judge(module: str, folder: Path) -> Verdict:
    """Judges a module by a tiny model, which is saved in ``folder``."""
    path = folder / module
    try:
        tiny.build(path, architecture=module, **configuration(module))
    except SystemExit:
        # The module needs a package that is not installed: the worker has to say so.
        tiny.build(path)
        config = json.loads((path / "config.json").read_text("utf-8"))
        (path / "config.json").write_text(json.dumps(config | {"model_type": module}))
    except Exception as error:
        return Verdict(module, "ERROR", says=f"{type(error).__name__}: {error}")
    try:
        with capture_logs() as logged:
            loaded = load(WorkerSettings("table/0", 1, "", "", str(path), module), _ignore)
    except ModelLoadError as error:
        return Verdict(module, "refused", says=" ".join(str(error).split()))
    except Exception as error:
        return Verdict(module, "ERROR", says=f"at start, {type(error).__name__}: {error}")
    try:
        wrong = Comparison(loaded, load_model(path)[0]).differences()
    except Exception as error:
        return Verdict(module, "ERROR", *_kinds(loaded), f"{type(error).__name__}: {error}")
    if wrong:
        return Verdict(module, "DIFFERS", *_kinds(loaded), "; ".join(wrong))
    says = "; ".join(str(line["reason"]) for line in logged if line["event"] in _SAID)
    return Verdict(module, "same" if loaded.probe.batchable else "one row", *_kinds(loaded), says)


def _ignore(*_: Any) -> None:
    """Takes a worker's reports of progress."""


def _kinds(loaded: LoadedModel) -> tuple[str, str, str]:
    cache = loaded.new_cache()
    kinds = sorted({type(layer).__name__ for layer in leaves(cache)})
    lists = "CacheList of " if any(hasattr(layer, "caches") for layer in cache) else ""
    return (
        lists + ", ".join(kinds),
        _CACHED_AT[loaded.card.prefixes],
        "together" if loaded.probe.padding_safe else "one at a time",
    )


@dataclass
class Comparison:
    """The engine's answers of a loaded model beside those of the same model as mlx-lm runs it."""

    loaded: LoadedModel
    model: Any
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    _known: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def differences(self) -> list[str]:
        """Returns the situations in which tokens differ, each with the first difference."""
        found = []
        if len({token for prompt in self.prompts for token in self.right(prompt)}) < _VARIETY:
            found.append("mlx-lm's own answers repeat a few tokens: choose other values")
        for situation, pairs in (
            ("alone", self._alone),
            ("batched", self._batched),
            ("staggered", self._staggered),
            ("choices", self._choices),
            ("cached", self._cached),
            ("continued", self._continued),
            ("small chunks", self._small_chunks),
        ):
            wrong = next((why for ask, ids in pairs() if (why := self._wrong(ask, ids))), None)
            if wrong:
                found.append(f"{situation}: {wrong}")
        return found

    @cached_property
    def prompts(self) -> list[list[int]]:
        return [self._some(n) for n in LENGTHS]

    def _some(self, length: int) -> list[int]:
        return [self.rng.randrange(8, 1700) for _ in range(length)]

    def _harness(self, **options: Any) -> EngineHarness:
        probe = self.loaded.probe
        return EngineHarness(
            self.loaded.model,
            probe.width,
            batchable=probe.batchable,
            padding_safe=probe.padding_safe,
            mixed_states=probe.mixed_states,
            cuttable=probe.cuttable,
            new_cache=self.loaded.new_cache,
            max_rows=16 if probe.batchable else 1,
            **options,
        )

    def _alone(self) -> Iterator[tuple[list[int], list[int]]]:
        for prompt in self.prompts:
            yield from self._answers(self._harness(), [prompt])

    def _batched(self) -> Iterator[tuple[list[int], list[int]]]:
        for prompts in (self.prompts, self.prompts[::-1], self.prompts[2:], self.prompts[:3]):
            yield from self._answers(self._harness(chunks=FixedChunks(512, 512)), prompts)

    def _staggered(self) -> Iterator[tuple[list[int], list[int]]]:
        for order in (self.prompts, self.prompts[::-1], self.prompts[3:] + self.prompts[:3]):
            harness = self._harness()
            keys = []
            for prompt in order:
                keys.append((prompt, harness.submit(EngineRequest(prompt, max_tokens=TOKENS))))
                for _ in range(3):
                    harness.turn()
            harness.finish()
            yield from ((prompt, harness.answers[key].ids()) for prompt, key in keys)

    def _choices(self) -> Iterator[tuple[list[int], list[int]]]:
        asks = [EngineRequest(prompt, max_tokens=TOKENS, n=3) for prompt in self.prompts[::2]]
        for ask, answer in zip(asks, self._harness().run(asks), strict=True):
            yield from ((ask.tokens, answer.ids(choice)) for choice in range(3))

    def _cached(self) -> Iterator[tuple[list[int], list[int]]]:
        """Prompts that share a beginning with earlier ones: all of a prompt, prompt and answer, a
        part, and the end of a system prompt."""
        for base in (20, 75):
            harness = self._harness()
            system = self._some(base)
            first = [*system, *self._some(40)]
            answer = harness.run([EngineRequest(first, max_tokens=TOKENS, boundaries=(base,))])
            whole = [*first, *answer[0].ids()]
            followers = [first, [*whole, *self._some(9)], [*system, *self._some(5)], first[:-7]]
            followers += [[*first, *self._some(1)], whole, system, first]
            for prompt in followers:
                yield from self._answers(harness, [prompt])
            yield from self._answers(harness, followers)

    def _continued(self) -> Iterator[tuple[list[int], list[int]]]:
        asks = [
            EngineRequest([*prompt, *self.right(prompt)[:cut]], max_tokens=TOKENS, generated=cut)
            for prompt in self.prompts[::2]
            for cut in _CUTS
        ]
        for ask, answer in zip(asks, self._harness().run(asks), strict=True):
            start = len(ask.tokens) - ask.generated
            yield ask.tokens[:start], [*ask.tokens[start:], *answer.ids()]

    def _small_chunks(self) -> Iterator[tuple[list[int], list[int]]]:
        for chunk in (13, 32):
            yield from self._answers(
                self._harness(chunks=FixedChunks(chunk, chunk)), [*self.prompts, self._some(133)]
            )

    def _answers(
        self, harness: EngineHarness, prompts: Sequence[list[int]]
    ) -> Iterator[tuple[list[int], list[int]]]:
        answers = harness.run([EngineRequest(prompt, max_tokens=TOKENS) for prompt in prompts])
        return zip(prompts, (answer.ids() for answer in answers), strict=True)

    def right(self, prompt: list[int]) -> list[int]:
        """Returns mlx-lm's greedy tokens after a prompt."""
        if (known := self._known.get(tuple(prompt))) is None:
            steps = generate_step(mx.array(prompt), self.model, max_tokens=TOKENS)
            known = self._known[tuple(prompt)] = [int(token) for token, _ in steps]
        return known

    def _wrong(self, prompt: list[int], got: list[int]) -> str:
        """Returns where an answer leaves mlx-lm's, unless two tokens are equally likely there;
        empty if it does not."""
        right = self.right(prompt)
        if got == right:
            return ""
        if len(got) != len(right):
            return f"a prompt of {len(prompt)} tokens has {len(got)} tokens as its answer"
        at = next(i for i, token in enumerate(got) if token != right[i])
        logits = self.model(mx.array([[*prompt, *right[:at]]]))[0, -1].astype(mx.float32)
        if (logits[right[at]] - logits[got[at]] < _TIE * mx.std(logits)).item():
            return ""
        return f"a prompt of {len(prompt)} tokens, at the answer's token {at}"
