"""``mayfly serve`` up to the point where the node takes over, in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.process

FETCHING = """
import json, os, time
print(json.dumps({"event": "progress", "what": "download", "done": os.getpid(), "total": 0}))
time.sleep(60)
"""
REFUSING = """
import json
print(json.dumps({"event": "error", "message": "There is no such model."}))
"""


def serve(fetch: str, state_dir: Path) -> subprocess.Popen[str]:
    """Serves with a fetch of the test's own, unbuffered."""
    command = (
        "import sys; from mayfly_cli.app import app; from mayfly_cli.commands import starting;"
        f"starting.FETCH = (sys.executable, '-u', '-c', {fetch!r});"
        f"app(['serve', '--port', '0', '--state-dir', {str(state_dir)!r}])"
    )
    return subprocess.Popen(
        [sys.executable, "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopping_while_a_model_is_fetched_ends_the_fetch(
    how: signal.Signals, tmp_path: Path
) -> None:
    with serve(FETCHING, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "model: downloading the model\n"
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 1
        process.send_signal(how)
        output, errors = process.communicate(timeout=30)
        assert process.returncode == 0
        assert (output, errors) == ("", "")
        assert not any(child.is_running() for child in children)


def test_a_model_that_cannot_be_had_is_one_sentence_on_stderr(tmp_path: Path) -> None:
    with serve(REFUSING, tmp_path) as process:
        output, errors = process.communicate(timeout=30)
        assert process.returncode == 1
        assert (output, errors) == ("", "mayfly: There is no such model.\n")
