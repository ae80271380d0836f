"""The gap in a stream whose worker is killed while a sibling is ready, measured."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest

from support.chaos_client import StreamingClient
from support.models.scripted import ScriptedReply
from support.server import Server, serving, wait_for

KILLS = 7
STEP_S = 0.02
BOUND_S = 0.25
BUDGETS = {"retry_s": 0.1, "spacing_s": 0.1, "steady_s": 0.0, "trial_losses": 1000}
TALE = " ".join(f"line {number}" for number in range(60))


def interrupted(server: Server) -> float:
    """Kills the worker of a stream in its middle; the time from its last token before that to the
    first one of the next worker."""
    wait_for(
        lambda: all(s["state"] == "ready" and not s["running"] for s in server.slots()),
        "every worker, idle",
    )
    idle = {slot["slot"]: slot["generated_tokens"] for slot in server.slots()}
    asking = StreamingClient(server, "[tale]")

    def running() -> dict[str, object] | None:
        moved = (s for s in server.slots() if s["generated_tokens"] > idle[s["slot"]] + 20)
        return next((slot for slot in moved if slot["running"]), None)

    worker = wait_for(running, "a running worker")
    os.kill(int(worker["pid"]), signal.SIGKILL)  # type: ignore[call-overload]
    answer = asking.result()
    assert answer.text == TALE
    crumb = server.autopsies()[-1]["breadcrumb"]
    assert answer.rid in crumb["requests"], "the kill fell into the stream"
    return answer.gap_s


@pytest.mark.long
def test_the_gap_after_a_kill_is_a_prefill_and_a_moment(
    scripted_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = scripted_model([ScriptedReply("[tale]", TALE)], step_s=STEP_S)
    options = ("--trust-remote-code", "--workers", "2")
    with serving(model, tmp_path, *options, budgets=BUDGETS) as server:
        gaps = [interrupted(server) for _ in range(KILLS)]
        # A prefill of what it had, without anybody dying, as a client sees it.
        started = time.monotonic()
        first = StreamingClient(server, f"[tale] {TALE}", max_tokens=2).result().at[0]
        prefill_s = first - started
        print(
            f"gaps {', '.join(f'{gap:.3f}' for gap in sorted(gaps))} s; prefill {prefill_s:.3f} s"
        )
        assert [autopsy["kind"] for autopsy in server.autopsies()] == ["killed"] * KILLS
        assert median(gaps) <= prefill_s + BOUND_S
