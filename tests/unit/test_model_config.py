"""A model's configuration means for mlx-lm what its authors meant, or the model is refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.rope_utils import YarnRoPE

from mayfly_protocol.settings import WorkerSettings
from mayfly_worker.model.loading import assemble
from mayfly_worker.model.weight_files import ModelLoadError
from support.models import tiny
from support.models.configurations import configuration

Config = dict[str, Any]

THETA = 500_000.0
DEFAULT = {"rope_type": "default", "rope_theta": THETA}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": THETA}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": THETA}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a tiny model of an architecture, once."""
    folders: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in folders:
            folder = tmp_path_factory.mktemp("model") / architecture
            known = architecture in tiny.ARCHITECTURES
            config = {} if known else configuration(architecture)
            tiny.build(folder, architecture=architecture, **config)
            folders[architecture] = folder
        return folders[architecture]

    return make


def logits(folder: Path, config: Config, without: tuple[str, ...] = ()) -> mx.array:
    """The logits of a model after its config.json was changed."""
    place = folder.with_name(f"{folder.name}-changed")
    shutil.copytree(folder, place)
    try:
        kept = json.loads((folder / "config.json").read_text())
        for name in without:
            kept.pop(name, None)
        (place / "config.json").write_text(json.dumps(kept | config))
        model, _, _ = assemble(WorkerSettings("s", 1, "", "", str(place), "model"))
        out: mx.array = model(mx.array([list(range(5, 45))]))
        mx.eval(out)
        return out
    finally:
        shutil.rmtree(place)


def as_transformers_5(folder: Path, rope: Any, **more: Any) -> mx.array:
    return logits(folder, {"rope_parameters": rope, **more}, ("rope_theta", "rope_scaling"))


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "gemma3_text", "qwen3_next"])
def test_N15_rope_parameters_of_transformers_5_count(
    made: Callable[[str], Path], architecture: str
) -> None:
    folder = made(architecture)
    right = logits(folder, {"rope_theta": THETA})
    assert not mx.allclose(right, logits(folder, {}))
    assert mx.array_equal(as_transformers_5(folder, DEFAULT), right)
    both = logits(folder, {"rope_parameters": DEFAULT, "rope_theta": 7.0})
    assert mx.array_equal(both, right), "transformers prefers the newer key"
    scaled = {"rope_theta": THETA, "rope_scaling": {"type": "linear", "factor": 4.0}}
    if architecture == "qwen3_moe":
        for each in (scaled, {"rope_parameters": LINEAR}):
            with pytest.raises(ModelLoadError, match=r"rope_scaling of the type linear.*qwen3_moe"):
                logits(folder, each)
        return
    assert mx.array_equal(as_transformers_5(folder, LINEAR), logits(folder, scaled))


def test_N15_rope_parameters_of_several_types_of_layers_count(
    made: Callable[[str], Path],
) -> None:
    local = {"rope_type": "default", "rope_theta": 300.0}
    layers = {"full_attention": LINEAR, "sliding_attention": local}
    earlier = {
        "rope_theta": THETA,
        "rope_local_base_freq": 300.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }
    folder = made("gemma3_text")
    assert mx.array_equal(as_transformers_5(folder, layers), logits(folder, earlier))
    same = {"full_attention": DEFAULT, "sliding_attention": DEFAULT}
    right = logits(made("llama"), {"rope_theta": THETA})
    assert mx.array_equal(as_transformers_5(made("llama"), same), right)
    with pytest.raises(ModelLoadError, match=r"differ between types of layers.*llama"):
        as_transformers_5(made("llama"), layers)
    with pytest.raises(ModelLoadError, match=r"differ between types of layers.*gemma3_text"):
        as_transformers_5(folder, {"full_attention": DEFAULT, "sliding_attention": LINEAR})


def test_N15_scaling_has_the_original_context_that_transformers_assumes(
    made: Callable[[str], Path],
) -> None:
    folder = made("llama")
    context = {"max_position_embeddings": 64}
    named = logits(
        folder,
        context
        | {
            "rope_theta": THETA,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    )
    assert mx.array_equal(as_transformers_5(folder, YARN, **context), named)
    usual = YARN | {"attention_factor": 1.13863}
    assert mx.array_equal(as_transformers_5(folder, usual, **context), named)


@pytest.mark.parametrize(
    ("architecture", "config", "named"),
    [
        ("llama", {"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5}}, "partial_rotary"),
        ("llama", {"rope_parameters": YARN | {"attention_factor": 1.0}}, "attention_factor"),
        ("mamba2", {"rope_parameters": DEFAULT}, "rope_theta"),
        ("mamba2", {"rope_scaling": LINEAR}, "rope_scaling of the type linear"),
        ("mixtral", {"rope_scaling": YARN}, "rope_scaling of the type yarn"),
        ("gemma2", {"rope_scaling": YARN}, "rope_scaling of the type yarn"),
        ("lfm2", {"rope_scaling": YARN}, "rope_scaling of the type yarn"),
        # It reads the factors of longrope, which are 1 where the scaling has none.
        ("minicpm3", {"rope_scaling": LINEAR}, "rope_scaling of the type linear"),
    ],
)
def test_N15_what_a_models_code_does_not_read_is_refused(
    made: Callable[[str], Path], architecture: str, config: Config, named: str
) -> None:
    with pytest.raises(ModelLoadError, match=f"{named}.*{architecture}"):
        logits(made(architecture), config)


def test_N15_an_output_layer_of_its_own_is_used_if_the_config_does_not_tie_it(
    made: Callable[[str], Path],
) -> None:
    folder = made("llama")
    right = logits(folder, {"tie_word_embeddings": False})
    assert mx.array_equal(logits(folder, {}, ("tie_word_embeddings",)), right)
    assert not mx.allclose(logits(folder, {"tie_word_embeddings": True}), right)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_scaling_counts_in_a_model_of_a_type_that_transformers_does_not_know(
    made: Callable[[str], Path], kind: str
) -> None:
    """Its tokenizer is loaded without the rules that transformers has for RoPE of other models."""
    folder = made("nemotron-nas")
    scaling = {"rope_type": kind, "factor": 8.0, "original_max_position_embeddings": 32}
    assert not mx.allclose(logits(folder, {"rope_scaling": scaling}), logits(folder, {}))


def test_yarn_is_not_rounded_to_whole_dimensions_where_the_configuration_says_so(
    made: Callable[[str], Path],
) -> None:
    """gpt-oss has ``truncate: false``; the blend is linear in the logarithm of the turns."""
    folder = made("gpt_oss")
    yarn = {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32768,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    exact, rounded = ({"rope_scaling": yarn | {"truncate": each}} for each in (False, True))
    assert not mx.allclose(logits(folder, exact), logits(folder, rounded))
    assert mx.array_equal(logits(folder, {"rope_scaling": yarn}), logits(folder, rounded))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | exact))
    model, _, _ = assemble(WorkerSettings("s", 1, "", "", str(folder), "model"))
    (folder / "config.json").write_text(json.dumps(config))
    found = [each._freqs for each in model.modules() if isinstance(each, YarnRoPE)]
    own = config["rope_theta"] ** (mx.arange(0, 16, 2) / 16)
    turns = 32768 / (2 * math.pi * own)
    stretched = mx.clip(mx.log(32 / turns) / math.log(32), 0, 1)
    right = 1 / ((1 - stretched) / own + stretched / (8 * own))
    assert len(found) == 2
    assert all(mx.allclose(each, right, rtol=1e-4) for each in found)


def test_yarn_whose_rounding_cannot_be_undone_is_refused(made: Callable[[str], Path]) -> None:
    scaling = YARN | {"truncate": False, "original_max_position_embeddings": 512}
    with pytest.raises(ModelLoadError, match=r"truncate in its RoPE parameters.*deepseek_v2"):
        logits(made("deepseek_v2"), {"rope_scaling": scaling})
