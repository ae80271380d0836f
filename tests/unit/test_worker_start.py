"""What a worker's process does before it runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from mayfly_protocol.settings import WorkerSettings, worker_settings

SCRIPT = """
import contextlib, gc, runpy, sys
import zmq

with contextlib.suppress(zmq.ZMQError):  # there is no such address: it gets as far as this
    runpy.run_module("mayfly_worker", run_name="__main__")
print(gc.isenabled(), gc.get_freeze_count(), len(gc.get_objects()))
"""


def test_the_garbage_collector_leaves_alone_what_was_imported(tiny_model: Path) -> None:
    settings = WorkerSettings("s", 1, "nowhere", "", str(tiny_model), "model")
    told = worker_settings.dump_json(settings).decode()
    command = [sys.executable, "-c", SCRIPT, "--settings", told]
    ran = subprocess.run(command, check=True, capture_output=True)
    enabled, frozen, watched = ran.stdout.split()
    assert enabled == b"True"
    assert int(frozen) > 20 * int(watched)


def test_reading_weights_needs_no_mlx() -> None:
    check = (
        "import mayfly_worker.warming, sys; "
        "assert not any(m.startswith(('mlx', 'transformers')) for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
