"""The start of a worker's process, before it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mayfly_protocol.settings import WorkerSettings, worker_settings

pytestmark = pytest.mark.process

SCRIPT = """
import contextlib, gc, runpy, sys
import zmq

with contextlib.suppress(zmq.ZMQError):  # there is no such address: it gets as far as this
    runpy.run_module("mayfly_worker", run_name="__main__")
print(gc.isenabled(), gc.get_freeze_count(), len(gc.get_objects()))
"""


def test_the_garbage_collector_leaves_alone_what_was_imported(tiny_model: Path) -> None:
    settings = WorkerSettings("s", 1, "nowhere", "", str(tiny_model), "model")
    told = worker_settings().dump_json(settings).decode()
    command = [sys.executable, "-c", SCRIPT, "--settings", told]
    ran = subprocess.run(command, check=True, capture_output=True)
    enabled, frozen, watched = ran.stdout.split()
    assert enabled == b"True"
    assert int(frozen) > 20 * int(watched)


@pytest.mark.parametrize("trusted", [False, True])
def test_torch_is_imported_for_nothing_but_code_of_a_models_own(
    tiny_model: Path, tmp_path: Path, trusted: bool
) -> None:
    """A torch that says so when it is imported, installed where a worker finds it."""
    (tmp_path / "torch-2.9.0.dist-info").mkdir()
    (tmp_path / "torch-2.9.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n"
    )
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch is imported')")
    settings = WorkerSettings(
        "s", 1, "nowhere", "", str(tiny_model), "model", trust_remote_code=trusted
    )
    told = worker_settings().dump_json(settings).decode()
    command = [sys.executable, "-c", SCRIPT, "--settings", told]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ("torch is imported" in ran.stderr) is trusted
    assert (ran.returncode == 0) is not trusted


def test_reading_weights_needs_no_mlx() -> None:
    check = (
        "import mayfly_worker.model.page_cache, sys; "
        "assert not any(m.startswith(('mlx', 'transformers')) for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
