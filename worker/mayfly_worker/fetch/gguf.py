"""Converts a GGUF file to an MLX model folder: Llama with a byte-level BPE tokenizer.

MLX reads GGUF's tensors and keeps their quantization (groups of 32). The conversion names the
tensors as mlx-lm does, puts the rows of q and k back in order, and writes the file's metadata as a
config and a tokenizer.

The metadata holds the tokens in order, the merges, and each token's type. It only names the way in
which text is cut before the merges (``tokenizer.ggml.pre``), so only a known name, SmolLM's, is
accepted.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mayfly_worker.fetch.reporting import FetchError

GROUP = 32
"""Number of weights that share a scale, in all of GGUF's formats that MLX keeps quantized."""

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_CONTROL = 3
_USER_DEFINED = 4
"""GGUF's types of tokens that are matched whole, before text is cut: control tokens, which are
special tokens, and user-defined ones, which are not."""

_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

Metadata = dict[str, Any]
Tensors = dict[str, mx.array]


def convert(source: Path, folder: Path, *, float32: bool) -> None:
    """Converts the GGUF file ``source``: writes config.json, model.safetensors and the tokenizer's
    files into ``folder``.

    ``float32`` stores the weights dequantized.

    Raises:
        FetchError: the file is not GGUF, or holds another model than Llama with SmolLM's tokenizer.
    """
    # On the CPU: the work is too little to wake a GPU for.
    with mx.stream(mx.cpu):
        _convert(source, folder, float32=float32)


def _convert(source: Path, folder: Path, *, float32: bool) -> None:
    read = mx.load(str(source), return_metadata=True)
    if not isinstance(read, tuple):
        raise FetchError(f"{source} is not a GGUF file.")
    tensors: Tensors
    metadata: Metadata
    tensors, metadata = read
    if metadata.get("general.architecture") != "llama":
        raise FetchError(f"{source.name} is no Llama: only those can be converted.")
    config = config_of(metadata, tied="output.weight" not in tensors)
    weights = _weights(tensors, config)
    if float32:
        weights = _dequantized(weights)
    else:
        weights = {name: _half(tensor) for name, tensor in weights.items()}
        config |= _quantization(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
    write_tokenizer(metadata, folder)


def config_of(metadata: Metadata, *, tied: bool) -> dict[str, Any]:
    """Returns the configuration of mlx-lm's Llama from a GGUF file's metadata. ``tied`` says that
    the output layer has the weights of the embedding."""

    def number(key: str) -> Any:
        if key not in metadata:
            raise FetchError(f"The GGUF file does not say its {key}.")
        return metadata[key].item()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": number("llama.embedding_length"),
        "num_hidden_layers": number("llama.block_count"),
        "intermediate_size": number("llama.feed_forward_length"),
        "num_attention_heads": number("llama.attention.head_count"),
        "num_key_value_heads": number("llama.attention.head_count_kv"),
        "head_dim": number("llama.rope.dimension_count"),
        "rms_norm_eps": number("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": number("llama.rope.freq_base"),
        "max_position_embeddings": number("llama.context_length"),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "bos_token_id": number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": number("tokenizer.ggml.eos_token_id"),
        "tie_word_embeddings": tied,
    }


def rename(name: str) -> str:
    """Returns mlx-lm's name of a GGUF tensor, such as ``model.layers.3.self_attn.q_proj.weight``
    for ``blk.3.attn_q.weight``. Raises FetchError if Llama has no such tensor."""
    match = re.fullmatch(r"(blk\.(\d+)\.)?(\w+)\.(weight|scales|biases)", name)
    if match is None or match[3] not in _NAMES:
        raise FetchError(f"The GGUF file has a tensor {name}, which no Llama has.")
    layer = f"model.layers.{match[2]}." if match[2] else ""
    return f"{layer}{_NAMES[match[3]]}.{match[4]}"


def unpermute(rows: mx.array, heads: int) -> mx.array:
    """Undoes llama.cpp's reordering of the rows of q and k; shape [heads * width, ...] in and out.

    In a head, rows i and i + width / 2 are a rotary pair. llama.cpp's ``convert_hf_to_gguf.py``
    (its ``permute``) puts the two next to each other, at 2i and 2i + 1. A row's quantization does
    not depend on its place, so packed weights, scales and biases are all treated alike.
    """
    width = rows.shape[0] // heads
    pairs = rows.reshape(heads, width // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _weights(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
    }
    weights = {}
    for name, tensor in tensors.items():
        renamed = rename(name)
        layer = renamed.split(".")[-2]
        weights[renamed] = unpermute(tensor, heads[layer]) if layer in heads else tensor
    return weights


def _quantized(weights: Tensors) -> list[tuple[str, int]]:
    """Returns the names of the quantized layers, each with the number of bits of a weight: 32 /
    bits weights share a uint32."""
    found = []
    for name, scales in weights.items():
        if name.endswith(".scales"):
            layer = name.removesuffix(".scales")
            packed = weights[f"{layer}.weight"].shape[-1]
            found.append((layer, packed * 32 // (scales.shape[-1] * GROUP)))
    return found


def _quantization(weights: Tensors) -> dict[str, Any]:
    """Returns the entry ``quantization`` of mlx-lm's config: the bits of most layers, and by name
    the layers with other bits. Empty if no layer is quantized."""
    layers = dict(_quantized(weights))
    if not layers:
        return {}
    bits = list(layers.values())
    usual = max(set(bits), key=bits.count)
    others = {name: {"group_size": GROUP, "bits": b} for name, b in layers.items() if b != usual}
    return {"quantization": {"group_size": GROUP, "bits": usual, **others}}


def _dequantized(weights: Tensors) -> Tensors:
    wide = {name: tensor for name, tensor in weights.items() if tensor.dtype != mx.uint32}
    for layer, bits in _quantized(weights):
        scales = wide.pop(f"{layer}.scales").astype(mx.float32)
        biases = wide.pop(f"{layer}.biases").astype(mx.float32)
        wide[f"{layer}.weight"] = mx.dequantize(
            weights[f"{layer}.weight"], scales, biases, group_size=GROUP, bits=bits
        )
    return {name: tensor.astype(mx.float32) for name, tensor in wide.items()}


def _half(tensor: mx.array) -> mx.array:
    """Casts float32 to float16, the type of the scales: a single float32 tensor would turn all
    results after it in the forward pass into float32."""
    return tensor.astype(mx.float16) if tensor.dtype == mx.float32 else tensor


def write_tokenizer(metadata: Metadata, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json into ``folder``, from a GGUF file's metadata.

    Raises:
        FetchError: the file's tokenizer is not SmolLM's.
    """
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    roles = {
        role: tokens[metadata[f"tokenizer.ggml.{key}_token_id"].item()]
        for role, key in _ROLES.items()
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"].item(),
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
        **roles,
    }
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def build_tokenizer(metadata: Metadata) -> Any:
    """Builds the ``tokenizers.Tokenizer`` that a GGUF file's metadata describes. A token's id is
    its index in the file's list of tokens. Only SmolLM's kind of tokenizer is supported.

    Raises:
        FetchError: the file's tokenizer is not SmolLM's.
    """
    kind = (metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise FetchError(f"The GGUF file's tokenizer is {kind}; only SmolLM's can be converted.")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types: list[int] = metadata["tokenizer.ggml.token_type"].tolist()
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    return tokenizer
