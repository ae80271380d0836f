"""Builds random-weight models of several architectures, saved as MLX folders, so small that a
forward pass takes about a millisecond.

The weights are float32 and depend on the seed alone. They are scaled so that greedy text varies (a
small random transformer with usual weights repeats one token for ever) and so that the best two
logits are rarely nearly equal. Rows of the output layer are zero for tokens that a trained model
would never choose: special tokens, and ids beyond the tokenizer's vocabulary. So greedy generation
always goes on to ``max_tokens``; for answers that end earlier, use :mod:`models.scripted`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from support.models import tokenizer as tokenizers

HEAD_DIM = 16
SLIDING_WINDOW = 32
"""Attention window, in tokens, of gemma3_text's local layers; shorter than most test prompts."""

_LOGIT_SCALE = 4.0
"""Standard deviation of the logits of a tiny model."""

Config = dict[str, Any]


def _transformer(hidden: int, layers: int) -> Config:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": hidden // HEAD_DIM,
        "num_key_value_heads": max(1, hidden // HEAD_DIM // 2),
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }


def _experts(hidden: int) -> Config:
    return {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": hidden,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def _llama(hidden: int, layers: int) -> Config:
    return _transformer(hidden, layers)


def _qwen3_moe(hidden: int, layers: int) -> Config:
    return _transformer(hidden, layers) | _experts(hidden)


def _gemma3_text(hidden: int, layers: int) -> Config:
    return _transformer(hidden, layers) | {
        "sliding_window": SLIDING_WINDOW,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": HEAD_DIM,
    }


def _qwen3_next(hidden: int, layers: int) -> Config:
    return (
        _transformer(hidden, layers)
        | _experts(hidden)
        | {
            "full_attention_interval": 2,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            # The Metal kernel needs a multiple of 32.
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "shared_expert_intermediate_size": hidden,
            "partial_rotary_factor": 0.5,
        }
    )


def _state_space(hidden: int, layers: int) -> Config:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 2 * hidden,
        "state_size": 16,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
        "tie_word_embeddings": False,
    }


def _mamba2(hidden: int, layers: int) -> Config:
    return _state_space(hidden, layers) | {
        "num_heads": 4,
        "head_dim": hidden // 2,
        "n_groups": 1,
        # The Metal kernel works on 32 states at a time.
        "state_size": 32,
        "layer_norm_epsilon": 1e-5,
        "time_step_limit": [0.001, 100.0],
    }


def _falcon_h1(hidden: int, layers: int) -> Config:
    """Config entries of a tiny Falcon-H1, with attention and a state-space model in each layer."""
    return _transformer(hidden, layers) | {
        "mamba_d_ssm": hidden,
        "mamba_d_head": hidden // 4,
        "mamba_n_heads": 4,
        # The Metal kernel works on 32 states at a time.
        "mamba_d_state": 32,
    }


LLAMA4: Config = {
    "model_type": "llama4_text",
    "attention_bias": False,
    "attention_chunk_size": 32,
    "head_dim": HEAD_DIM,
    "hidden_size": 64,
    "interleave_moe_layer_step": 1,
    "intermediate_size": 64,
    "intermediate_size_mlp": 64,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 2,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "use_qk_norm": True,
    "vocab_size": 1800,
}
"""The ``text_config`` of a tiny Llama 4, whose layers attend to chunks and cannot be batched."""


ARCHITECTURES: dict[str, Callable[[int, int], Config]] = {
    "llama": _llama,
    "qwen3_moe": _qwen3_moe,
    "gemma3_text": _gemma3_text,
    "qwen3_next": _qwen3_next,
    "mamba2": _mamba2,
    "mamba": _state_space,
    "falcon_h1": _falcon_h1,
}


def _weights(
    model: Any, vocabulary: int, seed: int, embeddings: float
) -> list[tuple[str, mx.array]]:
    """Random values for a model's parameters, drawn from the seed in the order of their names;
    ``vocabulary`` is the tokenizer's number of tokens."""
    rng = np.random.default_rng(seed)
    drawn = []
    for name, old in sorted(tree_flatten(model.parameters())):
        if name.endswith("A_log"):
            new = np.log(rng.uniform(1.0, 16.0, old.shape))
        elif old.ndim < 2:
            new = np.array(old)
        elif not mx.issubdtype(old.dtype, mx.floating):
            new = rng.integers(0, 1 << 32, old.shape)
        elif name.endswith("embed_tokens.weight") or name.endswith("embeddings.weight"):
            new = rng.normal(0.0, embeddings, old.shape)
        elif name == "lm_head.weight":
            new = rng.normal(0.0, _LOGIT_SCALE * old.shape[1] ** -0.5, old.shape)
            new[:3] = 0.0
            new[vocabulary:] = 0.0
        else:
            fan_in = old.shape[1] if "conv1d" in name else old.shape[-1]
            new = rng.normal(0.0, 2.0 * fan_in**-0.5, old.shape)
        drawn.append((name, mx.array(new).astype(old.dtype)))
    return drawn


def build(
    folder: Path,
    *,
    architecture: str = "llama",
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    context: int = 2048,
    tokenizer: tokenizers.Kind = "plain",
    padding: int = 0,
    embeddings: float = 1.0,
    template: str | None = None,
    **config: Any,
) -> Path:
    """Saves a tiny random-weight model into ``folder`` (made if need be) and returns the folder.

    ``padding`` is the number of logits beyond the tokenizer's vocabulary. ``embeddings`` is the
    standard deviation of the embeddings: large ones make a model that scales them up, and that has
    no other output layer, repeat a token for ever. ``template`` replaces the chat template; with an
    empty one the model has none. ``config`` overrides entries of config.json, and completes those
    of an architecture that is not in ``ARCHITECTURES``, which has a transformer's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = tokenizers.save(folder, tokenizer, context=context, template=template)
    tokens = vocabulary.get_vocab_size()
    whole: Config = {
        "model_type": architecture,
        "vocab_size": tokens + padding,
        "max_position_embeddings": context,
        "eos_token_id": vocabulary.token_to_id(tokenizers.END),
        **ARCHITECTURES.get(architecture, _transformer)(hidden, layers),
        **config,
    }
    mx.random.seed(seed)  # for the parameters that keep the values that MLX gives them
    module = importlib.import_module(f"mlx_lm.models.{architecture}")
    model = module.Model(module.ModelArgs.from_dict(whole))
    weights = _weights(model, tokens, seed, embeddings)
    model.update(tree_unflatten(weights))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(weights), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(whole, indent=2))
    return folder
