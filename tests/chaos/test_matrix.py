"""The chaos matrix: a fault of every kind in every phase of a request leaves its answer unchanged,
token for token."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mayfly_cli.commands.control import send_command
from mayfly_protocol.roster import Recycle
from mayfly_server.dispatch.link import REPORT_LAG_S
from support.chaos_client import QUICK_RETRIES, StreamedAnswer, StreamingClient
from support.chaos_matrix import (
    FILLER,
    MATRIX,
    QUEUED,
    ROW_AND_COLUMN,
    STEP_S,
    InjectedFault,
    MatrixCase,
)
from support.server import Server, serving, wait_for

CALM = {
    **QUICK_RETRIES,
    "batch_faults": 1000,
    "drain_s": 0.3,
    "stacks_s": 0.3,
    "terminate_s": 0.3,
}
# Where a machine is very busy, a worker that is well may be silent for two seconds. One that is
# stopped neither beats nor moves, and its silence has to be noticed first, also where the step that
# it was stopped in had waited for others.
IMPATIENT = CALM | {"decode_s": 8.0, "prefill_s": 8.0, "first_factor": 1.0, "silent_s": 4.0}


def ask(server: Server, text: str, **body: Any) -> StreamingClient:
    """Sends a request; all of them prefer the same worker."""
    return StreamingClient(server, text, prompt_cache_key="together", logprobs=True, **body)


def build(scripted_model: Callable[..., Path], included: Callable[[InjectedFault], bool]) -> Path:
    replies = [each for cell in MATRIX if included(cell.injected) for each in cell.replies()]
    return scripted_model([FILLER, *replies], step_s=STEP_S)


@pytest.fixture(scope="module")
def calm(
    scripted_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    model = build(scripted_model, lambda fault: not fault.slow)
    options = ("--trust-remote-code", "--workers", "3")
    with serving(model, tmp_path_factory.mktemp("calm"), *options, budgets=CALM) as server:
        yield server


@pytest.fixture(scope="module")
def impatient(
    scripted_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    model = build(scripted_model, lambda fault: fault.slow)
    options = ("--trust-remote-code", "--workers", "3")
    folder = tmp_path_factory.mktemp("impatient")
    with serving(model, folder, *options, budgets=IMPATIENT) as server:
        yield server


def continued(server: Server) -> float:
    """Counts requests that went on at another worker, whether their first one had accepted them or
    not."""
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(MOVES))


MOVES = ("mayfly_continuations_total{", "mayfly_request_retries_total{")


def ready(server: Server, count: int) -> bool:
    return sum(slot["state"] == "ready" for slot in server.slots()) >= count


def idle(server: Server) -> bool:
    """Returns once rosters show idle workers. Rosters that still count the last request would send
    the next one to another worker."""
    return not any(slot["running"] + slot["waiting"] for slot in server.slots())


@contextlib.contextmanager
def occupied(server: Server) -> Iterator[None]:
    """Keeps the other worker busy: a worker with its share of few requests would get no second
    one."""
    chat = server.client.chat.completions
    messages: Any = [{"role": "user", "content": FILLER.trigger}]
    with chat.create(
        model=server.model,
        messages=messages,
        stream=True,
        extra_body={"prompt_cache_key": "together"},
    ) as stream:
        next(iter(stream))
        # Until a roster came so long after a request, the front end counts it once more.
        began_s = wait_for(lambda: both_busy_s(server), "a roster with both")
        wait_for(lambda: both_busy_s(server) > began_s + REPORT_LAG_S, "a later one")
        yield


def both_busy_s(server: Server) -> float:
    """The age of the elder of two workers that have something to do, when the last roster came; 0
    where it shows no two."""
    busy = [slot["age_s"] for slot in server.slots() if slot["running"]]
    return max(busy) if len(busy) == 2 else 0.0


def inject(server: Server, cell: MatrixCase, slot: dict[str, Any]) -> None:
    """While the model waits: from outside, or by letting it go on to what it has to meet."""
    match cell.injected.name:
        case "handover":
            os.kill(slot["pid"], signal.SIGTERM)
        case "recycle":
            assert send_command(server.state_dir, Recycle(slot["slot"])).ok
        case _:
            (server.folder / f"{cell.wait}.go").touch()


def when_it_waits(server: Server, cell: MatrixCase) -> dict[str, Any]:
    """The slot of the worker whose model waits for a word."""
    waits = server.folder / f"{cell.wait}.waits"
    wait_for(waits.exists, "the moment")
    pid = int(waits.read_text())
    return next(slot for slot in server.slots() if slot["pid"] == pid)


def answers_across_fault(server: Server, cell: MatrixCase) -> tuple[StreamedAnswer, StreamedAnswer]:
    """Returns the answers of the request that met the fault and of the one that ran beside it."""
    if cell.phase is not QUEUED:
        asking = ask(server, cell.trigger, **cell.phase.body)
        if cell.held:
            inject(server, cell, when_it_waits(server, cell))
        return asking.result(), asking.result()
    blocker = ask(server, cell.blocker)
    slot = when_it_waits(server, cell)
    with occupied(server):
        asking = ask(server, cell.trigger, **cell.phase.body)
        assert asking.began.wait(30)

    def queue() -> int:
        return sum(each["waiting"] for each in server.slots() if each["slot"] == slot["slot"])

    wait_for(queue, "a queue")
    inject(server, cell, slot)
    return asking.result(), blocker.result()


def autopsy_of(server: Server, rid: str) -> dict[str, Any]:
    """Returns the autopsy of the worker in whose last forward pass a request was."""

    def found() -> dict[str, Any] | None:
        crumbs = ((a, a["breadcrumb"]) for a in server.autopsies())
        return next((a for a, crumb in crumbs if crumb and rid in crumb["requests"]), None)

    return wait_for(found, f"an autopsy that knows {rid}")


def run_case(server: Server, cell: MatrixCase) -> None:
    # One to lose and one to go on with; where requests are to meet, all, so that they do.
    wait_for(lambda: ready(server, 3 if cell.phase is QUEUED else 2), "workers")
    wait_for(lambda: idle(server), "an end of what was before")
    before = continued(server)
    struck, running = answers_across_fault(server, cell)
    moved = continued(server) - before

    undisturbed = ask(server, cell.trigger, **cell.phase.body).result()
    assert struck.content() == undisturbed.content()
    assert struck.logprobs == pytest.approx(undisturbed.logprobs, abs=1e-4)
    assert len(set(struck.call_ids)) == len(struck.calls)
    assert struck.text == (cell.phase.reply if cell.phase.says is None else cell.phase.says)
    if cell.phase is QUEUED:
        assert running.content() == ask(server, cell.blocker).result().content()

    # It landed where it was meant to.
    assert moved == (2 if cell.phase is QUEUED else 1)
    if cell.injected.kind not in ("", "left"):
        autopsy = autopsy_of(server, running.rid)
        assert autopsy["kind"] == cell.injected.kind
        crumb = autopsy["breadcrumb"]
        assert crumb["phase"] == ("prefill" if cell.phase.name == "prefill" else "decode")
        assert (struck.rid in crumb["requests"]) == (cell.phase is not QUEUED)
        assert bool(autopsy["suspects"] or autopsy["marked"]) == (cell.injected.kind != "killed")


def id_of(cell: MatrixCase) -> str:
    return cell.name


@pytest.mark.parametrize("cell", [c for c in ROW_AND_COLUMN if not c.injected.slow], ids=id_of)
def test_every_fault_and_every_phase(calm: Server, cell: MatrixCase) -> None:
    run_case(calm, cell)


@pytest.mark.parametrize("cell", [c for c in ROW_AND_COLUMN if c.injected.slow], ids=id_of)
def test_every_slow_fault(impatient: Server, cell: MatrixCase) -> None:
    run_case(impatient, cell)


@pytest.mark.long
@pytest.mark.parametrize(
    "cell", [c for c in MATRIX if not c.injected.slow and c not in ROW_AND_COLUMN], ids=id_of
)
def test_every_fault_in_every_phase(calm: Server, cell: MatrixCase) -> None:
    run_case(calm, cell)


@pytest.mark.long
@pytest.mark.parametrize(
    "cell", [c for c in MATRIX if c.injected.slow and c not in ROW_AND_COLUMN], ids=id_of
)
def test_every_slow_fault_in_every_phase(impatient: Server, cell: MatrixCase) -> None:
    run_case(impatient, cell)


def test_the_cells_cover_everything() -> None:
    assert len(MATRIX) == 81
    assert len(ROW_AND_COLUMN) == 17
    assert {cell.injected.name for cell in ROW_AND_COLUMN} == {
        cell.injected.name for cell in MATRIX
    }
    assert {cell.phase.name for cell in ROW_AND_COLUMN} == {cell.phase.name for cell in MATRIX}
    assert len({each.trigger for cell in MATRIX for each in cell.replies()}) == 90
    assert all(replace(cell) == cell for cell in MATRIX)
