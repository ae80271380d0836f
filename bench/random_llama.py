"""Builds Llama models with random weights, to measure speed with:
``python bench/random_llama.py 1b TOKENIZER OUT``."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.llama import Model, ModelArgs

SHAPES = {
    "1b": {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "heads": 32},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "heads": 32},
    "tiny": {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 512, "heads": 4},
}
VOCABULARY = 49152


def build(shape: str, tokenizer: Path, out: Path) -> Path:
    """Builds a random-weight model (bfloat16; float32 on a CPU) of one of SHAPES in the folder
    ``out``, with the tokenizer files of the model folder ``tokenizer``; returns ``out``."""
    sizes = dict(SHAPES[shape])
    heads = sizes.pop("heads")
    config = {
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        **sizes,
    }
    on_cpu = mx.default_device() == mx.cpu
    mx.random.seed(0)
    model = Model(ModelArgs.from_dict(config))
    model.update(
        tree_map(lambda p: p.astype(mx.float32 if on_cpu else mx.bfloat16), model.parameters())
    )
    mx.eval(model.parameters())
    out.mkdir(parents=True, exist_ok=True)
    from mlx_lm.utils import save_model

    save_model(out, model)
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "special_tokens_map.json",
    ):
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, out / name)
    eos = json.loads((tokenizer / "config.json").read_text()).get("eos_token_id", 2)
    (out / "config.json").write_text(json.dumps({**config, "eos_token_id": eos}, indent=2))
    return out


if __name__ == "__main__":
    build(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
