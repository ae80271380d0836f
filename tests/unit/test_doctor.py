"""The doctor's predictions about a model, beside the facts once it is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from mayfly_protocol.capabilities import shown
from mayfly_protocol.settings import WorkerSettings
from mayfly_worker.doctor import CONTEXTS, Fit, diagnose, fits
from mayfly_worker.engine.admission import Budget
from mayfly_worker.fetch.reporting import FetchError
from mayfly_worker.fetch.resolve import find
from mayfly_worker.model.loading import load
from mayfly_worker.model.weight_files import ModelLoadError
from support.models import tiny


def settings(folder: Path, **options: Any) -> WorkerSettings:
    return WorkerSettings("s", 1, "", "", str(folder), "model", **options)


def run(*arguments: str, cache: Path) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "mayfly_worker.doctor", "--cache", str(cache), *arguments]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return ran.returncode, json.loads(ran.stdout)


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_it_knows_what_loading_will_measure(architecture: str, tmp_path: Path) -> None:
    folder = tiny.build(tmp_path, architecture=architecture)
    told = diagnose(settings(folder))
    loaded = load(settings(folder), lambda *_: None)
    assert told.kv_bytes_per_token == loaded.probe.cost.per_token
    assert told.kv_bytes_per_row == loaded.probe.cost.per_row
    assert told.weight_bytes == loaded.card.weight_bytes
    assert told.context == loaded.card.context
    assert told.max_rows == loaded.card.rows
    assert told.architecture == loaded.card.architecture
    # What no file says shows only when the model runs.
    assert told.capabilities == shown(replace(loaded.card, padding=None))


def test_M09_a_model_that_cannot_be_batched_is_said_to_run_alone(tmp_path: Path) -> None:
    folder = tiny.build(tmp_path, architecture="llama4", text_config=tiny.LLAMA4)
    told = diagnose(settings(folder))
    because = "mlx-lm cannot batch caches of the class ChunkedKVCache"
    assert (told.capabilities["one_row_because"], told.max_rows) == (because, 1)
    with capture_logs() as logged:
        load(settings(folder), lambda *_: None)
    [said] = [line for line in logged if "one sequence at a time" in line["event"]]
    assert said["reason"] == because


def test_M11_a_model_whose_heads_cannot_be_quantized_is_refused(tmp_path: Path) -> None:
    folder = tiny.build(tmp_path, head_dim=80)
    with pytest.raises(ModelLoadError, match="a width of 80, which no size of groups divides"):
        diagnose(settings(folder, kv_bits=8))
    told = diagnose(settings(tiny.build(tmp_path, head_dim=96), kv_bits=8))
    assert told.capabilities["one_row_because"] == ""


def test_a_transformers_tokens_cost_keys_and_values(tmp_path: Path) -> None:
    told = diagnose(settings(tiny.build(tmp_path, layers=3, hidden=128)))
    layers, key_value_heads, head_size, float32 = 3, 4, tiny.HEAD_DIM, 4
    assert told.kv_bytes_per_token == layers * 2 * key_value_heads * head_size * float32
    assert told.kv_bytes_per_row == 0


def test_a_state_space_model_costs_the_same_at_any_length(tmp_path: Path) -> None:
    told = diagnose(settings(tiny.build(tmp_path, architecture="mamba2")))
    assert told.kv_bytes_per_token == 0
    assert told.kv_bytes_per_row > 0


def test_nothing_is_loaded(tmp_path: Path) -> None:
    folder = tiny.build(tmp_path, hidden=256, layers=4)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    told = diagnose(settings(folder))
    assert mx.get_peak_memory() - before < told.weight_bytes / 20
    assert told.weight_bytes == pytest.approx(told.file_bytes, rel=0.01)


def test_a_model_larger_than_the_memory_does_not_fit(tiny_model: Path) -> None:
    size = diagnose(settings(tiny_model)).weight_bytes
    told = diagnose(settings(tiny_model, memory_limit=size))
    assert not told.fits
    assert told.kv_budget == 0
    assert told.rows == [Fit(2048, 0)]
    assert diagnose(settings(tiny_model, memory_limit=size + (64 << 20))).fits


@pytest.mark.parametrize(
    ("context", "told"),
    [
        (0, CONTEXTS),
        (1024, (1024,)),
        (2048, (2048,)),
        (40960, (2048, 8192, 32768, 40960)),
    ],
)
def test_contexts_end_with_the_models_own(context: int, told: tuple[int, ...]) -> None:
    budget = Budget(max_rows=4, kv_bytes=1 << 40, bytes_per_token=1)
    assert fits(budget, context) == [Fit(length, 4) for length in told]


@given(
    max_rows=st.integers(1, 64),
    kv_bytes=st.integers(0, 10_000),
    per_token=st.integers(0, 5),
    per_row=st.integers(0, 500),
    longest=st.integers(1, 1000),
)
def test_as_many_rows_fit_as_would_be_admitted(
    max_rows: int, kv_bytes: int, per_token: int, per_row: int, longest: int
) -> None:
    budget = Budget(max_rows, kv_bytes, per_token, per_row)
    rows = budget.rows_at(longest)
    assert 0 <= rows <= max_rows
    assert rows == 0 or budget.need(rows, longest) <= kv_bytes
    assert rows == max_rows or budget.need(rows + 1, longest) > kv_bytes


@pytest.mark.process
def test_as_a_process_it_prints_one_object(tiny_model: Path, tmp_path: Path) -> None:
    code, told = run(str(tiny_model), "--options", '{"max_rows": 3}', cache=tmp_path)
    assert code == 0
    assert told["model"] == tiny_model.name
    assert told["path"] == str(tiny_model)
    assert told["rows"] == [{"context": 2048, "rows": 3}]
    code, told = run("./nothing", cache=tmp_path)
    assert code == 3
    assert told == {"error": "There is no folder ./nothing."}


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        ("", "The demo model is not on this machine yet"),
        ("some/model", "If the Hub has it, `hf download some/model` fetches it"),
        ("some model", "neither a folder here nor the id"),
    ],
)
def test_what_is_not_there_is_not_fetched(model: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=complaint):
        find(model, tmp_path)
    assert list(tmp_path.iterdir()) == []
