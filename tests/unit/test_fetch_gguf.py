"""GGUF files: llama.cpp's order of rows, MLX's packed weights, a tokenizer out of metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm import load
from tokenizers import Tokenizer

from mayfly_worker.fetch import gguf, model_folder
from mayfly_worker.fetch.reporting import FetchError
from support.models import tiny
from support.models.gguf_file import permute, write


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("original"))


def test_rows_come_back_in_order() -> None:
    # Two heads of width 6: rotary pairs are (0, 3), (1, 4), (2, 5) in each.
    rows = mx.arange(12)[:, None] * mx.ones((1, 5), dtype=mx.int32)
    mixed = permute(rows, heads=2)
    assert mixed[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert mx.array_equal(gguf.unpermute(mixed, heads=2), rows)


@given(heads=st.integers(1, 5), half=st.integers(1, 8), columns=st.integers(1, 4))
def test_unpermute_undoes_permute(heads: int, half: int, columns: int) -> None:
    rows = mx.array(np.random.default_rng(0).random((heads * half * 2, columns)))
    assert mx.array_equal(gguf.unpermute(permute(rows, heads), heads), rows)


def test_packed_rows_are_moved_like_any_others() -> None:
    rows = mx.array(np.random.default_rng(0).random((64, 64), dtype=np.float32))
    packed = mx.quantize(permute(rows, heads=2), group_size=32, bits=4)
    moved = [gguf.unpermute(part, heads=2) for part in packed]
    for ours, direct in zip(moved, mx.quantize(rows, group_size=32, bits=4), strict=True):
        assert mx.array_equal(ours, direct)


@pytest.mark.parametrize(
    ("name", "renamed"),
    [
        ("token_embd.scales", "model.embed_tokens.scales"),
        ("output.weight", "lm_head.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.12.ffn_gate.biases", "model.layers.12.mlp.gate_proj.biases"),
    ],
)
def test_tensors_get_their_names(name: str, renamed: str) -> None:
    assert gguf.rename(name) == renamed


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.attn_q.bias", "nothing"])
def test_a_tensor_that_no_llama_has_is_refused(name: str) -> None:
    with pytest.raises(FetchError, match=name):
        gguf.rename(name)


def test_a_converted_model_computes_what_the_original_does(original: Path, tmp_path: Path) -> None:
    gguf.convert(write(original, tmp_path / "model.gguf"), tmp_path, float32=True)
    model_folder.check(tmp_path)
    before, _ = load(str(original))
    after, _ = load(str(tmp_path))
    ids = mx.array([[5, 700, 31, 1500, 9, 260]])
    assert mx.array_equal(before(ids), after(ids))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["max_position_embeddings"] == 2048
    assert config["tie_word_embeddings"] is False
    assert "quantization" not in config


@pytest.mark.parametrize("float32", [False, True])
def test_quantized_weights_are_kept_or_widened(
    original: Path, tmp_path: Path, float32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX writes no quantized GGUF, so what it would read from one is put in its place."""
    source = write(original, tmp_path / "model.gguf")
    tensors, metadata = mx.load(str(source), return_metadata=True)
    packed, rounded = quantize(tensors)
    monkeypatch.setattr(gguf.mx, "load", lambda *_, **__: (packed, metadata))
    gguf.convert(source, tmp_path, float32=float32)
    monkeypatch.undo()
    stored = mx.load(str(tmp_path / "model.safetensors"))
    dtypes = {tensor.dtype for tensor in stored.values()}
    assert dtypes == ({mx.float32} if float32 else {mx.float16, mx.uint32})

    config = json.loads((tmp_path / "config.json").read_text())
    assert config.get("quantization") == (
        None
        if float32
        else {
            "group_size": 32,
            "bits": 4,
            "model.embed_tokens": {"group_size": 32, "bits": 8},
        }
    )
    model, _ = load(str(tmp_path))
    reference, _ = load(str(original))
    gguf_names = {gguf.rename(name): name for name in rounded}
    reference.load_weights(
        [
            (name, gguf.unpermute(rounded[old], heads_of(name)) if heads_of(name) else rounded[old])
            for name, old in gguf_names.items()
        ],
        strict=False,
    )
    ids = mx.array([[5, 700, 31]])
    tolerance = 1e-5 if float32 else 0.1
    assert mx.abs(model(ids).astype(mx.float32) - reference(ids)).max() < tolerance


def quantize(tensors: dict[str, mx.array]) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """Tensors as MLX reads them from a Q4_1 file, and the values that they stand for."""
    packed, rounded = {}, {}
    for name, tensor in tensors.items():
        if tensor.ndim < 2:
            packed[name] = rounded[name] = tensor
            continue
        layer, bits = name.removesuffix(".weight"), 8 if name.startswith("token_embd") else 4
        weight, scales, biases = mx.quantize(tensor.astype(mx.float16), group_size=32, bits=bits)
        packed |= {name: weight, f"{layer}.scales": scales, f"{layer}.biases": biases}
        wide = (scales.astype(mx.float32), biases.astype(mx.float32))
        rounded[name] = mx.dequantize(weight, *wide, group_size=32, bits=bits)
    return packed, rounded


def heads_of(name: str) -> int:
    return {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2], 0)


def test_a_model_of_another_kind_is_refused(original: Path, tmp_path: Path) -> None:
    source = write(original, tmp_path / "model.gguf", {"general.architecture": "mamba"})
    with pytest.raises(FetchError, match="is no Llama"):
        gguf.convert(source, tmp_path, float32=True)


def test_a_tokenizer_of_another_kind_is_refused(original: Path, tmp_path: Path) -> None:
    source = write(original, tmp_path / "model.gguf", {"tokenizer.ggml.pre": "llama-bpe"})
    with pytest.raises(FetchError, match="llama-bpe"):
        gguf.convert(source, tmp_path, float32=True)


@pytest.fixture(scope="module")
def tokenizers(original: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The original and what became of it on the way through a GGUF file's metadata."""
    source = write(original, tmp_path_factory.mktemp("gguf") / "model.gguf")
    _, metadata = mx.load(str(source), return_metadata=True)
    return Tokenizer.from_file(str(original / "tokenizer.json")), gguf.build_tokenizer(metadata)


@given(text=st.text())
def test_any_text_survives_a_converted_tokenizer(tokenizers: tuple[Any, Any], text: str) -> None:
    _, converted = tokenizers
    assert converted.decode(converted.encode(text).ids, skip_special_tokens=False) == text


def test_a_converted_tokenizer_cuts_text_as_the_original(tokenizers: tuple[Any, Any]) -> None:
    original, converted = tokenizers
    text = "def main(self):\n    return 'hello, wörld'  # 世界 😀<|im_end|>\n"
    assert converted.encode(text).ids == original.encode(text).ids
    assert converted.get_vocab() == original.get_vocab()
    assert converted.encode("a<|im_end|>").ids[-1] == 2
    assert converted.decode([2], skip_special_tokens=True) == ""


def test_digits_stand_alone(tokenizers: tuple[Any, Any]) -> None:
    _, converted = tokenizers
    assert converted.encode("20242024").tokens == list("20242024")
