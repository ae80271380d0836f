"""Several different requests that break things, at once, beside requests that do not: a server with
real processes, and an account of what each of them got."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import openai

from support.chaos_client import StreamingClient
from support.chaos_matrix import METAL_HANG, SHAPES
from support.models import scripted
from support.models.scripted import ModelFault, ScriptedReply
from support.server import Server, serving, wait_for

TALE = " ".join(f"line {number}" for number in range(120))
BUDGETS = {"verdict_wait_s": 10.0, "prefill_s": 4.0, "decode_s": 4.0, "first_factor": 1.0}
"""Default time limits, but that a worker that hangs is found soon, and that the reaper's verdict is
waited for although the machine is busy."""

POISONS: dict[str, tuple[ModelFault, str]] = {
    "shape, prefill": (ModelFault("prefill", "raise", SHAPES), "shape"),
    "allocation, prefill": (
        ModelFault("prefill", "raise", "[malloc] Unable to allocate 123 bytes."),
        "allocation_failed",
    ),
    "crash, prefill": (ModelFault("prefill", "segfault"), "crashed"),
    "shape, token 40": (ModelFault(40, "raise", SHAPES), "shape"),
    "unknown, prefill": (ModelFault("prefill", "raise", "nobody knows this one"), "unknown"),
    "crash, token 40": (ModelFault(40, "segfault"), "crashed"),
    "GPU hang, token 3": (ModelFault(3, "raise", METAL_HANG), "metal_hang"),
    "wedge, prefill": (ModelFault("prefill", "spin_gil_released"), "wedged"),
    "buffer size, prefill": (
        ModelFault(
            "prefill",
            "raise",
            "[metal::malloc] Attempting to allocate 99 bytes which is greater than the maximum "
            "allowed buffer size of 9 bytes.",
        ),
        "metal_buffer_size",
    ),
    "NaN, token 40": (ModelFault(40, "nan"), "nonfinite_logits"),
}
"""Requests that break things: the fault of each, and the kind by which its error has to name it."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of one round: the errors that the poisons got, the innocents' texts or errors,
    their longest gap between two chunks, the kinds of fault of the workers that were lost, and the
    number of requests in quarantine."""

    codes: list[str]
    texts: list[str]
    longest_gap_s: float
    lost: list[str]
    batch_faults: int
    quarantined: int
    retryable: list[bool]


def model(folder: Path, step_s: float = 0.02) -> Path:
    """Builds the model: each name in :data:`POISONS` in a prompt makes it fail in that way, other
    prompts get :data:`TALE`."""
    plans = [ScriptedReply(f"[{name}]", TALE, [fault]) for name, (fault, _) in POISONS.items()]
    return scripted.build(folder, [*plans, ScriptedReply("[tale]", TALE)], step_s=step_s)


@contextlib.contextmanager
def served(path: Path, folder: Path, workers: int) -> Iterator[Server]:
    options = ("--trust-remote-code", "--workers", str(workers))
    with serving(path, folder, *options, budgets=BUDGETS) as server:
        wait_for(lambda: all(s["state"] == "ready" for s in server.slots()), "every worker")
        yield server


def _quarantined(server: Server) -> int:
    [entries] = re.findall(
        r"^mayfly_quarantine_entries (\S+)", server.http.get("/metrics").text, re.M
    )
    return round(float(entries))


def play(server: Server, poisons: Sequence[str], innocents: int, within_s: float) -> Outcome:
    """Lets the poisons come at once, beside streams that have begun, and waits until all have
    ended."""
    streams = [StreamingClient(server, f"[tale] {n}") for n in range(innocents)]
    wait_for(lambda: all(stream.answer.at or not stream.is_alive() for stream in streams), "tokens")
    asked = [StreamingClient(server, f"[{name}]") for name in poisons]
    clients = [*streams, *asked]
    wait_for(lambda: not any(c.is_alive() for c in clients), "every end", within_s)
    errors = [client.error for client in asked]
    return Outcome(
        codes=[str(getattr(error, "code", None)) for error in errors],
        texts=[s.answer.text if s.error is None else repr(s.error) for s in streams],
        longest_gap_s=max((s.answer.gap_s for s in streams if len(s.answer.at) > 1), default=0.0),
        lost=[record["kind"] for record in server.autopsies()],
        batch_faults=server.log().count("a new engine serves on"),
        quarantined=_quarantined(server),
        retryable=[
            isinstance(error, openai.APIError) and error.body["retryable"]  # type: ignore[index]
            for error in errors
        ],
    )
