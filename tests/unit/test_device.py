"""Descriptions of devices, in the form that each build of MLX gives them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mayfly_worker.engine import admission
from mayfly_worker.model import memory

CUDA = {
    "device_name": "NVIDIA H200",
    "uuid": "GPU-0c6d5a52-6b0e-4d0b-9f4a-1d6e3c2b8a70",
    "architecture": "sm_90",
    "pci_bus_id": "0000:19:00.0",
    "compute_capability_major": 9,
    "compute_capability_minor": 0,
    "free_memory": 149_203_386_368,
    "total_memory": 150_754_820_096,
}
METAL = {
    "device_name": "Apple M2 Ultra",
    "architecture": "applegpu_g14d",
    "max_buffer_length": 86_586_540_032,
    "max_recommended_working_set_size": 115_448_725_504,
    "memory_size": 137_438_953_472,
    "resource_limit": 499_000,
}
CPU = {"device_name": "AMD EPYC", "architecture": "x86_64"}


@pytest.mark.parametrize(
    ("info", "free"),
    [(CUDA, 149_203_386_368), (METAL, None), (CPU, None)],
    ids=["cuda", "metal", "cpu"],
)
def test_what_is_free_of_a_device_with_memory_of_its_own(
    monkeypatch: pytest.MonkeyPatch, info: dict[str, Any], free: int | None
) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: info)
    assert admission.free_memory() == free
    if free is not None:
        assert memory.free_bytes() == free


def test_this_machine_answers() -> None:
    assert (admission.free_memory() is not None) == mx.cuda.is_available()
