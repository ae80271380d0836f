"""Network namespaces that a dead test run left behind are removed, and no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from support.network_namespaces import Network, leftovers_kept, namespaces, why_no_networks
from support.processes import alive
from support.server import wait_for

pytestmark = pytest.mark.fleet

DYING = """
import sys, time
from support.network_namespaces import Network
network = Network().__enter__()
machine = network.machine("mac", 11)
slept = machine.start(["sleep", "600"], sys.stderr)
# One that does not end with its run, as a worker that outlives its supervisor for a while.
stays = machine.start(["sh", "-c", "setsid sleep 600 & wait"], sys.stderr)
print(slept.pid, flush=True)
time.sleep(600)
"""


def test_leftovers_of_a_run_that_was_killed_are_removed() -> None:
    if reason := why_no_networks():
        pytest.skip(f"no networks here: {reason}")
    with Network() as own:
        command = [sys.executable, "-c", DYING]
        tests = Path(__file__).parents[1]
        with subprocess.Popen(command, cwd=tests, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None
            slept = psutil.Process(int(run.stdout.readline()))
            # Only then has setpriv asked for the signal at its parent's end.
            wait_for(lambda: slept.name() == "sleep", "the command that setpriv runs")
            theirs = {name for name in namespaces() if f"-{run.pid}-" in name}
            assert len(theirs) == 2
            with leftovers_kept():  # other tests may be about to remove them
                run.kill()
                run.wait()
                wait_for(lambda: not alive(slept), "the end of what ended with it")
                assert theirs <= set(namespaces())
        with Network():
            left = set(namespaces())
        assert not theirs & left
        assert own.switch in left, "this run is not over"
    assert own.switch not in namespaces()
