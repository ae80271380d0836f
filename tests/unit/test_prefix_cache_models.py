"""A warm answer is the cold one, on tiny random-weight models, and which kind of model hits where.

The KV state of a sliding window (gemma3_text) or of a recurrent layer (qwen3_next, mamba2) cannot
go back, so those hit where the table in ``test_where_each_kind_of_model_hits`` says.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from mayfly_worker.prefix_cache import PrefixCache

Tokens = list[int]
VOCABULARY = 160
WINDOW = 24
ANSWER = 12

TRANSFORMER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": TRANSFORMER,
    "gemma3_text": TRANSFORMER
    | {"sliding_window": WINDOW, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
    "qwen3_next": TRANSFORMER
    | {
        "full_attention_interval": 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.5,
    },
    "mamba2": {
        "num_heads": 4,
        "head_dim": 16,
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "state_size": 32,
        "num_hidden_layers": 2,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": [0.001, 100.0],
        "time_step_rank": 4,
    },
}
every_model = pytest.mark.parametrize("name", CONFIGS)


@pytest.fixture(autouse=True)
def _on_cpu() -> Iterator[None]:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


@cache
def model(name: str) -> Any:
    """A model whose weights are large enough that its greedy text wanders."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    made = module.Model(module.ModelArgs.from_dict({"model_type": name, **CONFIGS[name]}))
    rng = np.random.default_rng(3)
    weights = []
    for key, old in sorted(tree_flatten(made.parameters())):
        if old.ndim == 1:
            weights.append((key, old))
            continue
        scale = 1.0 if "embed" in key else 4.0 if "lm_head" in key else 2.0
        fan_in = 1 if "embed" in key else old.shape[-2 if "conv" in key else -1]
        drawn = rng.normal(0, scale * fan_in**-0.5, old.shape).astype(np.float32)
        weights.append((key, mx.array(drawn)))
    made.update(tree_unflatten(weights))
    mx.eval(made.parameters())
    return made


def prompt(seed: int, length: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


def logits(name: str, tokens: Tokens, caches: list[Any]) -> mx.array:
    """Feed ``tokens`` and return the last one's logits."""
    out = model(name)(mx.array([tokens]), cache=caches)[0, -1]
    mx.eval(out, [layer.state for layer in caches])
    return out


def answer(name: str, last: mx.array, caches: list[Any]) -> Tokens:
    tokens: Tokens = []
    while len(tokens) < ANSWER:
        tokens.append(int(mx.argmax(last).item()))
        last = logits(name, tokens[-1:], caches)
    return tokens


def prefilled(name: str, tokens: Tokens) -> list[Any]:
    caches = make_prompt_cache(model(name))
    logits(name, tokens, caches)
    return caches


def assert_warm_is_cold(store: PrefixCache, name: str, query: Tokens, hit_length: int) -> None:
    """The query hits at ``hit_length`` (0: not), and goes on as it would from a cold start."""
    hit = store.lookup(query, len(query) - 1)
    assert (hit.length if hit else 0) == hit_length
    if not hit:
        return
    warm = logits(name, query[hit.length :], hit.caches)
    cold_caches = make_prompt_cache(model(name))
    cold = logits(name, query, cold_caches)
    if name == "llama":
        assert (warm == cold).all().item(), "bits differ"
    else:
        assert mx.abs(warm - cold).max().item() < 2e-4
    warm_answer = answer(name, warm, hit.caches)
    assert warm_answer == answer(name, cold, cold_caches)
    assert len(set(warm_answer)) > 2, "the text must wander for the comparison to mean something"


S, L = 60, 360


@pytest.mark.parametrize(
    ("name", "stored", "repeated", "extended", "shortened", "diverged"),
    [
        # One entry of ``stored`` tokens; the hits of: the same prompt again, one that goes on
        # from it, its first 20 tokens, one that is the same for 20 tokens.
        ("llama", S, S - 1, S, 19, 20),
        ("gemma3_text", WINDOW - 1, WINDOW - 2, WINDOW - 1, 19, 20),
        ("gemma3_text", WINDOW, 0, WINDOW, 0, 0),
        ("gemma3_text", S, 0, S, 0, 0),
        ("qwen3_next", S, 0, S, 0, 0),
        ("mamba2", S, 0, S, 0, 0),
    ],
)
def test_where_each_kind_of_model_hits(
    name: str, stored: int, repeated: int, extended: int, shortened: int, diverged: int
) -> None:
    tokens = prompt(1, stored)
    store = PrefixCache(1 << 30)
    store.insert(tokens, prefilled(name, tokens))
    assert_warm_is_cold(store, name, tokens, repeated)
    assert_warm_is_cold(store, name, tokens + prompt(2, 40), extended)
    assert_warm_is_cold(store, name, tokens[:20], shortened)
    assert_warm_is_cold(store, name, tokens[:20] + prompt(3, 30), diverged)


@every_model
def test_a_prompt_stored_without_its_last_token_is_found_again(name: str) -> None:
    tokens = prompt(4, S)
    store = PrefixCache(1 << 30)
    store.insert(tokens[:-1], prefilled(name, tokens[:-1]))
    assert_warm_is_cold(store, name, tokens, S - 1)


@every_model
def test_a_short_prompt_after_a_long_one_is_answered_as_if_alone(name: str) -> None:
    """Run long, then short, short again, and short with another end, as a server would."""
    long = prompt(5, L)
    short = long[:S]
    store = PrefixCache(1 << 30)
    store.insert(long, prefilled(name, long))
    trims = name == "llama"
    assert_warm_is_cold(store, name, short, S - 1 if trims else 0)
    store.insert(short[:-1], prefilled(name, short[:-1]))
    assert_warm_is_cold(store, name, short, S - 1)
    assert_warm_is_cold(store, name, short, S - 1)
    assert_warm_is_cold(store, name, short + prompt(6, 30), S if trims else S - 1)
    assert_warm_is_cold(store, name, long + prompt(6, 30), L)


@every_model
def test_turns_of_a_conversation_hit_at_the_latest_boundary(name: str) -> None:
    """Entries that were themselves begun from an entry, and stored in the middle of decoding."""
    store = PrefixCache(1 << 30)
    system = prompt(7, 20)
    store.insert(system, prefilled(name, system), kind="system")
    history = list(system)
    for turn in range(3):
        history += prompt(10 + turn, 17)
        assert_warm_is_cold(store, name, history, len(history) - 17)
        hit = store.lookup(history, len(history) - 1)
        assert hit is not None
        assert hit.kind == ("answer" if turn else "system")
        last = logits(name, history[hit.length :], hit.caches)
        history += answer(name, last, hit.caches)
        store.insert(history, hit.caches, kind="answer")
    # Where entries can be trimmed the last turn's stands in for the system prompt's.
    assert_warm_is_cold(store, name, system + prompt(20, 30), 20)


@every_model
def test_a_row_of_a_ragged_batch_serves_as_well_as_a_run_of_its_own(name: str) -> None:
    rows = [prompt(30, S), prompt(31, 18), prompt(32, 41)]
    longest = max(map(len, rows))
    layers = make_prompt_cache(model(name))
    batch = [layer.merge([copy.deepcopy(layer) for _ in rows]) for layer in layers]
    for layer in batch:
        layer.prepare(lengths=list(map(len, rows)), right_padding=[longest - len(r) for r in rows])
    model(name)(mx.array([r + [0] * (longest - len(r)) for r in rows]), cache=batch)
    for layer in batch:
        layer.finalize()
    store = PrefixCache(1 << 30)
    for i, row in enumerate(rows):
        store.insert(row, [layer.extract(i) for layer in batch])
    assert len(store) == 3
    for row in rows:
        assert_warm_is_cold(store, name, row + prompt(33, 25), len(row))


@every_model
def test_two_requests_that_take_one_entry_do_not_disturb_each_other(name: str) -> None:
    tokens, one, other = prompt(40, S), prompt(41, 30), prompt(42, 30)
    store = PrefixCache(1 << 30)
    store.insert(tokens, prefilled(name, tokens))
    first = store.lookup(tokens + one, S + 29)
    second = store.lookup(tokens + other, S + 29)
    assert first is not None
    assert second is not None
    alone = logits(name, other, copy.deepcopy(second.caches))
    answer(name, logits(name, one, first.caches), first.caches)
    assert (logits(name, other, second.caches) == alone).all().item()
    assert_warm_is_cold(store, name, tokens + one, S)


def test_a_window_that_keeps_its_first_tokens_goes_on_where_it_was() -> None:
    # Its cold run depends on the prefill's chunks, so the original is what to compare with.
    own = [RotatingKVCache(max_size=WINDOW, keep=4) for _ in model("llama").layers]
    tokens: Tokens = []
    for asked in (prompt(50, 10), prompt(51, 3)):
        tokens += asked + answer("llama", logits("llama", asked, own), own)
    assert own[0].offset == len(tokens) > WINDOW
    store = PrefixCache(1 << 30)
    store.insert(tokens, own)
    for rest in (prompt(52, 1), prompt(53, 30)):
        hit = store.lookup(tokens + rest, len(tokens))
        assert hit is not None
        warm = logits("llama", rest, hit.caches)
        original = copy.deepcopy(own)
        right = logits("llama", rest, original)
        assert mx.abs(warm - right).max().item() < 2e-4
        assert answer("llama", warm, hit.caches) == answer("llama", right, original)
