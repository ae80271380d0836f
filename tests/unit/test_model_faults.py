"""Faults of the scripted models that their process does not outlive, or hangs in."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.models import scripted
from support.models.scripted import ModelFault, ScriptedReply

pytestmark = pytest.mark.process

FORWARD = """
import faulthandler, os, signal, sys, threading, time
import mlx.core as mx
from mlx_lm import load

faulthandler.register(signal.SIGUSR2)
model, tokenizer = load(sys.argv[1], trust_remote_code=True)
prompt = tokenizer.apply_chat_template([{"role": "user", "content": "[boom]"}])

def tick():
    while True:
        os.write(1, b"tick\\n")
        time.sleep(0.01)

threading.Thread(target=tick, daemon=True).start()
os.write(1, b"loaded\\n")
model(mx.array([prompt]))
os.write(1, b"survived\\n")
"""


@contextmanager
def forward(
    scripted_model: Callable[..., Path], fault: ModelFault
) -> Iterator[subprocess.Popen[str]]:
    """A process that loads a model with this fault and runs it once, beside a thread that ticks."""
    folder = scripted_model([ScriptedReply("[boom]", "one two three", faults=[fault])])
    process = subprocess.Popen(
        [sys.executable, "-c", FORWARD, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("fault", "returncode", "last_words"),
    [
        (ModelFault("prefill", "abort", "libc++abi: terminating"), -6, "libc++abi: terminating\n"),
        (ModelFault("prefill", "kill"), -9, ""),
    ],
    ids=lambda value: value.action if isinstance(value, ModelFault) else "",
)
def test_a_fault_ends_the_process(
    scripted_model: Callable[..., Path], fault: ModelFault, returncode: int, last_words: str
) -> None:
    with forward(scripted_model, fault) as process:
        out, err = process.communicate(timeout=60)
    assert "loaded" in out
    assert "survived" not in out
    assert process.returncode == returncode
    assert err == last_words


def wait_for_stack(process: subprocess.Popen[str], function: str) -> None:
    """Returns once faulthandler shows some thread inside ``function``."""
    assert process.stdout and process.stderr
    assert "loaded\n" in iter(process.stdout.readline, "")
    dump = b""
    while function.encode() not in dump:
        if select.select([process.stderr], [], [], 0.1)[0]:
            dump += os.read(process.stderr.fileno(), 1 << 16)
        else:
            process.send_signal(signal.SIGUSR2)


def ticks(process: subprocess.Popen[str], patience_s: float) -> bool:
    """Returns True if the ticking thread still runs: 20 reads that have something, or a silence."""
    assert process.stdout
    for _ in range(20):
        if not select.select([process.stdout], [], [], patience_s)[0]:
            return False
        os.read(process.stdout.fileno(), 1 << 20)
    return True


@pytest.mark.parametrize(
    ("action", "stack", "ticking"),
    [
        ("spin_gil_released", "_spin_releasing_the_gil", True),
        ("spin_gil_held", "_spin_holding_the_gil", False),
    ],
)
def test_a_fault_hangs_the_process(
    scripted_model: Callable[..., Path], action: scripted.FaultAction, stack: str, ticking: bool
) -> None:
    with forward(scripted_model, ModelFault("prefill", action)) as process:
        wait_for_stack(process, stack)
        assert ticks(process, patience_s=10.0 if ticking else 0.3) is ticking
