"""Fixtures of the tests on a real GPU. They need an NVIDIA GPU, MLX's CUDA build and some minutes:
``pytest -m gpu -n0 -s tests/gpu``. They print their measurements as rows of tables."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from support.models import cuda


@pytest.fixture(scope="session", autouse=True)
def on_a_gpu() -> None:
    if not mx.cuda.is_available():
        pytest.skip("there is no CUDA device")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, on_a_gpu: None) -> Path:
    return cuda.build(tmp_path_factory.mktemp("cuda"))
