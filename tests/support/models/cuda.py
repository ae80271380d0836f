"""Builds a random-weight Llama, of a real model's size, that fails on an NVIDIA GPU when a prompt
contains certain words.

The faults are real ones of the GPU. :mod:`support.models.cuda_model` is the model's code, which
runs in the worker.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models import llama
from mlx_lm.utils import save_model

from support.models import tokenizer as tokenizers

CODE = Path(__file__).with_name("cuda_model.py")
ONE_BILLION = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
"""Shape of a Llama with about a billion parameters, with the tests' small vocabulary."""

FAULTS = {"illegal": 8, "spin": 8, "memory": 8, "kill": 0}
"""The faults by name, with the number of decode steps after which each happens; 0 is in the
prefill."""


def trigger(fault: str) -> str:
    """Returns the words that trigger the fault of this name when a prompt contains them."""
    return f" then came the {fault}"


def build(
    folder: Path, shape: Mapping[str, int] = ONE_BILLION, faults: Mapping[str, int] = FAULTS
) -> Path:
    """Saves the faulty Llama, in bfloat16, into ``folder`` (made if need be); returns the folder.
    To load the model, ``trust_remote_code`` is needed."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = tokenizers.save(folder, "plain", context=8192)
    config = {
        "model_type": "llama",
        "model_file": "model.py",
        "vocab_size": vocabulary.get_vocab_size(),
        "max_position_embeddings": 8192,
        "eos_token_id": vocabulary.token_to_id(tokenizers.END),
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        **shape,
    }
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.update(tree_map(lambda p: p.astype(mx.bfloat16), model.parameters()))
    mx.eval(model.parameters())
    save_model(folder, model)
    described = [
        {"name": name, "trigger": vocabulary.encode(trigger(name)).ids, "after": after}
        for name, after in faults.items()
    ]
    (folder / "faults.json").write_text(json.dumps(described))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    shutil.copyfile(CODE, folder / "model.py")
    return folder
