"""The engine on every kind of model: what is found out about each, and that its answers are right.

Right is what a plain loop over the model says, one row on mlx-lm's own cache. Tokens are compared,
not bits: a window that has wrapped and a recurrent state give the same ones to about 1e-5.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache
from mlx_lm.utils import load_model
from structlog.testing import capture_logs

from mayfly_protocol.requests import Sampling
from mayfly_protocol.settings import WorkerSettings
from mayfly_worker.engine import caches
from mayfly_worker.model.loading import load
from mayfly_worker.model.probe import Probe, bounded_as_unbounded, probe
from mayfly_worker.model.reference_store import ReferenceStore
from mayfly_worker.model.weight_files import ModelLoadError
from mayfly_worker.prefix_cache.layers import leaves
from support.engine_harness import GREEDY, EngineHarness, EngineRequest, FixedChunks
from support.models import tiny
from support.models.configurations import configuration

pytestmark = pytest.mark.heavy

WINDOW = 48


@dataclass(frozen=True)
class ModelCase:
    """A model and how it is served. ``trims``: a cached prompt serves any beginning of it."""

    architecture: str
    batchable: bool = True
    padding_safe: bool = True
    trims: bool = True
    max_kv_size: int | None = None
    kv_bits: int | None = None
    head_dim: int | None = None
    rare: bool = False


CASES = {
    "llama": ModelCase("llama"),
    "qwen3_moe": ModelCase("qwen3_moe"),
    "gemma3_text": ModelCase("gemma3_text", trims=False),
    "qwen3_next": ModelCase("qwen3_next", trims=False),
    "mamba2": ModelCase("mamba2", trims=False),
    "falcon_h1": ModelCase("falcon_h1", trims=False),
    "mamba": ModelCase("mamba", padding_safe=False, trims=False),
    "quantized cache": ModelCase("llama", kv_bits=8, head_dim=96),
    "quantized cache beside windows": ModelCase(
        "gemma3_text", trims=False, kv_bits=4, head_dim=64, rare=True
    ),
    "bounded cache": ModelCase("qwen3_moe", trims=False, max_kv_size=WINDOW),
    "bounded llama": ModelCase("llama", trims=False, max_kv_size=WINDOW, rare=True),
}


@dataclass(frozen=True)
class ServedModel:
    """A loaded model with the settings that probing finds for it."""

    case: ModelCase
    model: Any
    found: Probe
    new_cache: caches.Factory

    def harness(self, max_rows: int = 16, **options: Any) -> EngineHarness:
        return EngineHarness(
            self.model,
            self.found.width,
            batchable=self.found.batchable,
            padding_safe=self.found.padding_safe,
            mixed_states=self.found.mixed_states,
            cuttable=self.found.cuttable,
            max_rows=max_rows if self.found.batchable else 1,
            new_cache=self.new_cache,
            **options,
        )

    def alone(self, ask: EngineRequest) -> list[list[int]]:
        [answer] = self.harness().run([ask])
        return [answer.ids(c) for c in range(ask.n)]

    def greedy(self, prompt: list[int], tokens: int) -> list[int]:
        """A plain loop over the model, which is fed the last token apart, as by mlx-lm. (mlx-lm's
        bounded cache keeps the first tokens in sight only if it is fed one at a time.)"""
        cache, feed = self.new_cache(), prompt
        if self.case.max_kv_size is not None:
            cache = [RotatingKVCache(self.case.max_kv_size, keep=4) for _ in cache]
            for token in prompt[:-1]:
                self.model(mx.array([[token]]), cache=cache)
            feed = prompt[-1:]
        elif len(prompt) > 1:
            self.model(mx.array([prompt[:-1]]), cache=cache)
            feed = prompt[-1:]
        said: list[int] = []
        while len(said) < tokens:
            logits = self.model(mx.array([feed]), cache=cache)[0, -1]
            feed = [int(mx.argmax(logits).item())]
            said += feed
        return said


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.long] if case.rare else [])
        for name, case in CASES.items()
    ],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    case = CASES[request.param]
    options = {"head_dim": case.head_dim} if case.head_dim else {}
    folder = tiny.build(tmp_path_factory.mktemp("model"), architecture=case.architecture, **options)
    model = load_model(folder)[0]
    new_cache = caches.factory(model, case.max_kv_size, case.kv_bits)
    return ServedModel(case, model, probe(model, new_cache, ReferenceStore.of("", "")), new_cache)


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(8, 1700) for _ in range(length)]


def asks(rng: random.Random, count: int) -> list[EngineRequest]:
    """Prompts of one token and of more than any window, some with a beginning in common."""
    shared = prompt(rng, 70)
    found = []
    for i in range(count):
        head = shared[: rng.choice([0, 20, 70])]
        sampling = Sampling(
            seed=i,
            temperature=rng.choice([0.0, 0.8]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.2]),
        )
        found.append(
            EngineRequest(
                head + prompt(rng, rng.choice([1, 3, 18, 60])),
                sampling,
                max_tokens=rng.choice([2, 8, 18]),
                n=rng.choice([1, 1, 3]),
                boundaries=(len(head),) if head else (),
            )
        )
    return found


def test_what_is_found_out(served: ServedModel) -> None:
    found, case = served.found, served.case
    assert found.width == 1800
    assert found.batchable is case.batchable
    assert found.padding_safe is case.padding_safe
    layers = list(leaves(served.new_cache()))
    grows = any(isinstance(layer, (KVCache, QuantizedKVCache)) for layer in layers)
    fixed = any(isinstance(layer, (ArraysCache, RotatingKVCache)) for layer in layers)
    assert (found.cost.per_token > 0) is grows
    assert (found.cost.per_row > 0) is fixed


def test_a_row_says_what_the_model_says(served: ServedModel) -> None:
    rng = random.Random(1)
    for length in (1, 31, 90):
        ask = EngineRequest(prompt(rng, length), GREEDY, max_tokens=20)
        [told] = served.alone(ask)
        assert told == served.greedy(ask.tokens, 20)
        assert len(set(told)) > 3, "the text must wander for the comparison to mean something"


@pytest.mark.parametrize("bucketed", [False, True])
def test_together_equals_alone(served: ServedModel, bucketed: bool) -> None:
    rng = random.Random(2)
    harness = served.harness(chunks=FixedChunks(2048, 64), bucketed=bucketed)
    wanted = asks(rng, 6)
    keys = []
    for ask in wanted:
        keys.append(harness.submit(ask))
        for _ in range(rng.choice([0, 0, 0, 4])):
            harness.turn()
    harness.finish()
    for key, ask in zip(keys, wanted, strict=True):
        answer = harness.answers[key]
        assert [answer.ids(c) for c in range(ask.n)] == served.alone(ask)


def test_in_small_chunks_with_cancels_and_evictions_equals_alone(served: ServedModel) -> None:
    rng = random.Random(3)
    harness = served.harness(chunks=FixedChunks(32, 32), max_rows=5, prefix_bytes=60_000)
    kept = harness.run_with_cancels(asks(rng, 6), rng, 4)
    for key, ask in kept.items():
        answer = harness.answers[key]
        assert [answer.ids(c) for c in range(ask.n)] == served.alone(ask)


def test_a_continuation_goes_on_where_the_lost_run_stopped(served: ServedModel) -> None:
    rng = random.Random(4)
    for length, temperature in ((5, 0.9), (75, 0.9), (75, 0.0)):
        sampling = Sampling(seed=3, temperature=temperature, repetition_penalty=1.1)
        ask = EngineRequest(prompt(rng, length), sampling, max_tokens=18)
        [whole] = served.alone(ask)
        resumed = [replace(ask, tokens=ask.tokens + whole[:k], generated=k) for k in (1, 2, 13, 17)]
        together = served.harness().run(resumed)
        assert [a.ids() for a in together] == [whole[a.generated :] for a in resumed]


def test_a_warm_answer_is_the_cold_one(served: ServedModel) -> None:
    rng = random.Random(5)
    harness = served.harness()
    first = EngineRequest(prompt(rng, 80), max_tokens=20)
    [cold] = served.alone(first)
    assert [a.ids() for a in harness.run([first])] == [cold]
    [again] = harness.run([first])
    assert (again.ids(), again.cached) == (cold, 79)
    longer = EngineRequest(first.tokens + cold + prompt(rng, 9), max_tokens=20)
    [warm] = harness.run([longer])
    assert warm.cached == 100
    assert [warm.ids()] == served.alone(longer)
    others = [EngineRequest(first.tokens + prompt(rng, 5), max_tokens=20) for _ in range(3)]
    for ask, answer in zip(others, harness.run(others), strict=True):
        assert answer.cached == (80 if served.case.trims else 79)
        assert [answer.ids()] == served.alone(ask)


def test_R90_a_short_prompt_after_a_long_one_is_answered_as_if_alone(served: ServedModel) -> None:
    rng = random.Random(6)
    harness = served.harness()
    long = prompt(rng, 300)
    short = EngineRequest(long[:60], max_tokens=20)
    other = EngineRequest(long[:60] + prompt(rng, 30), max_tokens=20)
    cold = {id(ask): served.alone(ask)[0] for ask in (short, other)}
    harness.run([EngineRequest(long)])
    for ask in (short, short, other, short):
        [answer] = harness.run([ask])
        assert answer.ids() == cold[id(ask)]


def test_memory_comes_back(served: ServedModel) -> None:
    """A request leaves nothing on the device but the entries of the prefix cache."""
    rng = random.Random(7)
    harness = served.harness(prefix_bytes=0)
    harness.run(asks(rng, 4))
    mx.clear_cache()
    before = mx.get_active_memory()
    harness.run(asks(rng, 6))
    mx.clear_cache()
    assert mx.get_active_memory() - before < 100_000


@pytest.mark.parametrize(
    ("architecture", "options", "named"),
    [
        ("gemma3_text", {"max_kv_size": 64}, "max_kv_size"),
        ("mamba2", {"kv_bits": 8}, "kv_bits"),
        ("qwen3_moe", {"kv_bits": 8, "max_kv_size": 64}, "kv_bits"),
        ("qwen3_moe", {"kv_bits": 8}, "a width of 16, which no size of groups divides"),
        ("qwen3_moe", {"kv_group_size": 32}, "without kv_bits"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    tmp_path: Path, architecture: str, options: dict[str, int], named: str
) -> None:
    folder = tiny.build(tmp_path, architecture=architecture)
    settings = WorkerSettings("test/0", 1, "", "", str(folder), "test", **options)
    with pytest.raises(ModelLoadError, match=named):
        load(settings, lambda *_: None)


@pytest.mark.parametrize(
    ("architecture", "options", "rows"),
    [
        ("qwen3_moe", {"max_kv_size": 64}, 32),
        ("llama", {"max_kv_size": 64}, 32),
        ("llama", {"kv_bits": 8}, 32),
        ("llama", {"kv_bits": 5, "kv_group_size": 128}, 32),
        ("mamba", {}, 32),
    ],
)
def test_how_many_rows_a_loaded_model_runs(
    tmp_path: Path, architecture: str, options: dict[str, int], rows: int
) -> None:
    wider = {"head_dim": 128} if "kv_bits" in options else {}
    folder = tiny.build(tmp_path, architecture=architecture, **wider)
    settings = WorkerSettings("test/0", 1, "", "", str(folder), "test", **options)
    assert load(settings, lambda *_: None).card.rows == rows


def test_a_model_that_is_not_padding_safe_would_be_wrong_in_a_group(tmp_path: Path) -> None:
    """So that what probing finds is more than a guess."""
    model = load_model(tiny.build(tmp_path, architecture="mamba"))[0]
    rng = random.Random(8)
    ragged = [EngineRequest(prompt(rng, n)) for n in (40, 30)]
    alone = [EngineHarness(model, 1800).run([ask])[0].ids() for ask in ragged]
    together = EngineHarness(model, 1800, padding_safe=True).run(ragged)
    apart = EngineHarness(model, 1800, padding_safe=False).run(ragged)
    assert [a.ids() for a in apart] == alone
    assert together[1].ids() != alone[1]


ONE_ROW = {
    "M01": "gemma2",  # the masks of a batch do not fit scores of grouped heads
    "M01 too": "gpt_bigcode",  # positions of a batch are taken for one number
    "M02": "afm7",  # layers that reuse keys take the batch's longest row for each row's length
    "M03": "minimax_m3_vl",  # blocks of a batch are counted from its padding
}


def loaded_tiny(
    folder: Path, module: str, max_kv_size: int | None = None, **config: Any
) -> ServedModel:
    """Loads a tiny model of one of mlx-lm's modules, as a worker does."""
    tiny.build(folder, architecture=module, **configuration(module) | config)
    settings = WorkerSettings("test/0", 1, "", "", str(folder), "test", max_kv_size=max_kv_size)
    loaded = load(settings, lambda *_: None)
    case = ModelCase(module, max_kv_size=max_kv_size)
    return ServedModel(case, loaded.model, loaded.probe, loaded.new_cache)


@pytest.mark.parametrize("name", ONE_ROW)
def test_M01_M02_M03_a_model_that_a_batch_breaks_is_served_alone(tmp_path: Path, name: str) -> None:
    with capture_logs() as logged:
        served = loaded_tiny(tmp_path, ONE_ROW[name])
    assert not served.found.batchable
    assert "the model runs one sequence at a time" in [line["event"] for line in logged]
    rng = random.Random(19)
    asks = [EngineRequest(prompt(rng, n), GREEDY, max_tokens=12) for n in (1, 130, 60)]
    asks.append(EngineRequest([*asks[1].tokens, *prompt(rng, 20)], GREEDY, max_tokens=12))
    for ask, answer in zip(asks, served.harness().run(asks), strict=True):
        assert answer.ids() == served.greedy(ask.tokens, 12)


@pytest.mark.parametrize(
    "module",
    [
        "nanbeige",  # two passes over the layers, each with caches of its own
        "nemotron-nas",  # a layer without attention has no cache
        "afm7",  # the last layers read the cache of the layer before them
    ],
)
def test_M06_caches_are_bounded_where_layers_and_caches_do_not_pair(
    tmp_path: Path, module: str
) -> None:
    served = loaded_tiny(tmp_path, module, WINDOW)
    rng = random.Random(21)
    asks = [EngineRequest(prompt(rng, n), GREEDY, max_tokens=20) for n in (1, 20, 90)]
    for ask, answer in zip(asks, served.harness().run(asks), strict=True):
        assert answer.ids() == served.greedy(ask.tokens, 20)


@pytest.mark.parametrize(
    ("module", "config"),
    [
        # It takes a state of zeros for another than none.
        ("recurrent_gemma", {}),
        # It keeps the last tokens, of which a short prompt has fewer.
        ("longcat_flash_ngram", {"ngram_vocab_size_ratio": 1}),
        # It takes them for the same.
        ("lfm2", {}),
    ],
)
def test_M04_a_prompt_of_a_token_or_two_joins_a_running_batch_as_if_alone(
    tmp_path: Path, module: str, config: dict[str, Any]
) -> None:
    served = loaded_tiny(tmp_path, module, **config)
    assert served.found.batchable
    assert served.found.mixed_states is (module == "lfm2")
    rng = random.Random(20)
    harness = served.harness()
    asks = [
        EngineRequest(prompt(rng, length), GREEDY, max_tokens=24, n=n)
        for length, n in ((40, 1), (1, 1), (2, 2), (1, 2), (3, 1), (30, 1))
    ]
    keys = []
    for ask in asks:
        keys.append(harness.submit(ask))
        for _ in range(3):
            harness.turn()
    assert harness.engine.running == sum(ask.n for ask in asks)
    harness.finish()
    for key, ask in zip(keys, asks, strict=True):
        alone = served.greedy(ask.tokens, 24)
        assert [harness.answers[key].ids(choice) for choice in range(ask.n)] == [alone] * ask.n


def test_short_prompts_tell_a_model_that_reads_their_padding(tmp_path: Path) -> None:
    """Nemotron-H adds the last tokens of a prompt to its state once more for its padding."""
    served = loaded_tiny(tmp_path, "nemotron_h")
    assert (served.found.batchable, served.found.padding_safe) == (True, False)
    rng = random.Random(21)
    asks = [EngineRequest(prompt(rng, n), GREEDY, max_tokens=9) for n in (2, 5, 30, 7)]
    for ask, answer in zip(asks, served.harness().run(asks), strict=True):
        assert answer.ids() == served.greedy(ask.tokens, 9)


def test_a_model_whose_tokens_depend_on_where_a_prompt_is_cut_gets_prompts_whole(
    tmp_path: Path,
) -> None:
    served = loaded_tiny(tmp_path, "phi3small")
    assert not served.found.cuttable
    rng = random.Random(22)
    harness = served.harness(chunks=FixedChunks(32, 32))
    ask = EngineRequest(prompt(rng, 70), GREEDY, max_tokens=9, n=2)
    right = served.greedy(ask.tokens, 9)
    for _ in range(2):
        [answer] = harness.run([ask])
        assert [answer.ids(choice) for choice in range(2)] == [right, right]
        assert answer.cached == 0
    resumed = replace(ask, tokens=ask.tokens + right[:4], generated=4, n=1)
    [answer] = harness.run([resumed])
    assert answer.ids() == right[4:]


@pytest.mark.parametrize("module", ["llama", "starcoder2"])
def test_a_window_of_the_configuration_counts_where_mlx_lm_ignores_it(
    tmp_path: Path, module: str
) -> None:
    """With one layer, the next token depends on the tokens in the window alone."""
    kind = "mistral" if module == "llama" else module
    served = loaded_tiny(
        tmp_path, module, model_type=kind, num_hidden_layers=1, sliding_window=WINDOW
    )

    def right(tokens: list[int], window: int) -> list[int]:
        tokens = list(tokens)
        for _ in range(9):
            logits = served.model(mx.array([tokens[-window:]]))[0, -1]
            tokens.append(int(mx.argmax(logits).item()))
        return tokens[-9:]

    rng = random.Random(23)
    asks = [EngineRequest(prompt(rng, n), GREEDY, max_tokens=9) for n in (20, 130, WINDOW, 60)]
    wanted = [right(ask.tokens, WINDOW) for ask in asks]
    assert wanted[1] != right(asks[1].tokens, 999), "the window has to matter"
    for chunk in (13, 512):
        harness = served.harness(chunks=FixedChunks(chunk, chunk))
        assert [answer.ids() for answer in harness.run(asks)] == wanted


def test_a_model_whose_code_fails_on_any_prompt_is_refused(tmp_path: Path) -> None:
    layers = ["conv", "sliding_attention", "full_attention"]
    with pytest.raises(ModelLoadError, match=r"test cannot be run: its code raised AttributeErr"):
        loaded_tiny(tmp_path, "gear", layer_types=layers)


@pytest.mark.skipif(mx.metal.is_available(), reason="its kernels run here")
def test_a_model_with_kernels_for_metal_alone_is_refused_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"test cannot be run on this device: .* a Mac"):
        loaded_tiny(tmp_path, "bitnet")


class Rounding(nn.Module):
    """A model whose logits differ at random from call to call; with ``alone_too`` also those of a
    sequence that runs alone."""

    def __init__(self, model: nn.Module, alone_too: bool) -> None:
        super().__init__()
        self.model = model
        self._alone_too = alone_too
        self._calls = 0

    def __call__(self, tokens: mx.array, **kwargs: Any) -> mx.array:
        self._calls += 1
        logits: mx.array = self.model(tokens, **kwargs)
        if tokens.shape[0] == 1 and not self._alone_too:
            return logits
        noise = mx.random.normal(logits.shape, key=mx.random.key(self._calls))
        return logits + 0.2 * mx.std(logits) * noise


@pytest.mark.parametrize("alone_too", [True, False])
def test_what_rounding_makes_of_any_computation_is_no_fault_of_batches(
    tmp_path: Path, alone_too: bool
) -> None:
    """In 16 bits, the logits of some models move by a standard deviation with the order of
    computation, whether sequences run together or alone."""
    model = load_model(tiny.build(tmp_path, seed=1))[0]
    found = probe(Rounding(model, alone_too), caches.factory(model), ReferenceStore(None, "", {}))
    assert found.batchable == found.padding_safe == alone_too


def assert_as_if_alone(served: ServedModel, asks: list[EngineRequest], known: list[int]) -> None:
    """Checks answers beside any other requests, on engines that have seen a prompt before (or
    none)."""
    alone = [served.alone(ask) for ask in asks]
    for first, count in product(range(len(asks)), (2, len(asks))):
        order = [(first + i) % len(asks) for i in range(count)]
        harness = served.harness()
        if known:
            harness.run([EngineRequest([*known, 5], max_tokens=1)])
        answers = harness.run([asks[i] for i in order])
        for i, answer in zip(order, answers, strict=True):
            assert [answer.ids(choice) for choice in range(asks[i].n)] == alone[i]


def test_prompts_of_a_token_or_two_run_beside_others(served: ServedModel) -> None:
    """The last token is never prefilled: of these there is little to prefill, or nothing."""
    rng = random.Random(17)
    kinds = ((1, 1), (2, 1), (1, 2), (2, 2), (3, 1))
    asks = [EngineRequest(prompt(rng, length), max_tokens=6, n=n) for length, n in kinds]
    assert_as_if_alone(served, asks, [])


def test_prompts_that_are_cached_to_their_ends_run_beside_others(served: ServedModel) -> None:
    rng = random.Random(18)
    known = prompt(rng, 40)
    kinds = ((1, 1), (2, 1), (1, 2), (3, 1))
    asks = [EngineRequest([*known, *prompt(rng, more)], max_tokens=6, n=n) for more, n in kinds]
    assert_as_if_alone(served, asks, known)


class ReadsClasses(nn.Module):
    """A model that reads the last token only where its caches are plain ones."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.layers = model.layers

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        plain = type(cache[0]) is KVCache
        logits: mx.array = self.model(tokens if plain else tokens + 1, cache=cache)
        return logits


def test_M06_a_model_whose_answers_a_bounded_cache_changes_is_told_apart(tmp_path: Path) -> None:
    model = load_model(tiny.build(tmp_path))[0]
    for tried, right in ((model, True), (ReadsClasses(model), False)):
        assert bounded_as_unbounded(tried, caches.factory(tried, WINDOW)) is right
