"""Writes GGUF files like those that llama.cpp's converter makes, from a tiny Llama's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def permute(rows: mx.array, heads: int) -> mx.array:
    """Reorders the rows of an attention weight as ``LlamaModel.permute`` of llama.cpp's converter
    does: rows i and i + width / 2 of each head become neighbours."""
    return (
        rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


def write(model: Path, target: Path, changes: dict[str, Any] | None = None) -> Path:
    """Writes the model in folder ``model`` to ``target``, with ``changes`` to its metadata."""
    config = json.loads((model / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors = {}
    for name, tensor in mx.load(str(model / "model.safetensors")).items():
        layer = name.removesuffix(".weight")
        if layer.startswith("model.layers."):
            _, _, number, layer = layer.split(".", 3)
            renamed = f"blk.{number}.{_NAMES[layer]}.weight"
        else:
            renamed = f"{_NAMES[layer]}.weight"
        last = layer.split(".")[-1]
        tensors[renamed] = permute(tensor, heads[last]) if last in heads else tensor
    metadata = _metadata(config, model) | (changes or {})
    mx.save_gguf(str(target), tensors, metadata)
    return target


def _metadata(config: dict[str, Any], model: Path) -> dict[str, Any]:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {token["id"] for token in tokenizer["added_tokens"]}
    numbers = {
        "llama.embedding_length": config["hidden_size"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.rope.dimension_count": config["head_dim"],
        "llama.context_length": config["max_position_embeddings"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
    }
    template = json.loads((model / "tokenizer_config.json").read_text())["chat_template"]
    return {
        **{key: mx.array(value, dtype=mx.uint32) for key, value in numbers.items()},
        "llama.attention.layer_norm_rms_epsilon": mx.array(config["rms_norm_eps"]),
        "llama.rope.freq_base": mx.array(config["rope_theta"]),
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.token_type": mx.array(
            [3 if i in special else 1 for i in range(len(tokens))]
        ),
        "tokenizer.chat_template": template,
    }
