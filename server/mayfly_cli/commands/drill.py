"""``mayfly drill``: kills workers of a running server under load, and checks that no request is
lost."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mayfly_cli.commands.client import DEFAULT_URL, Url, connect, get_json
from mayfly_cli.failure import fail

if TYPE_CHECKING:
    import httpx

    from mayfly_cli.drill.load import DrillLoad
    from mayfly_cli.drill.report import SentSignal
    from mayfly_cli.drill.workers import PoolWorker, ReadWorkers

SIGNALS = ("kill", "segv", "abrt", "stop")
PROMPTS = 8
WATCH_S = 1.5
"""Seconds for which the workers are watched before the drill, to see if other clients use them."""
WARM_UP_S = 1.0
"""Seconds before each signal to a worker, so that the worker is generating text when it gets the
signal."""


def drill(
    url: Url = DEFAULT_URL,
    model: Annotated[
        str | None,
        typer.Option(
            help="The model whose workers get the signals; needed if several models are served."
        ),
    ] = None,
    signals: Annotated[
        str,
        typer.Option(help=f"Signals to send, in this order: any of {','.join(SIGNALS)}."),
    ] = ",".join(SIGNALS),
    rounds: Annotated[
        int, typer.Option(help="Number of times that all signals are sent.", min=1)
    ] = 1,
    clients: Annotated[
        int, typer.Option(help="Number of clients, each with one stream at a time.", min=1, max=256)
    ] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=2)] = 128,
    wait: Annotated[
        float,
        typer.Option(help="Seconds that the pool may take to recover from each signal.", min=1),
    ] = 300.0,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask, even if others use the pool.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Kill workers on purpose, and check that no client notices.

    Streams completions from a running server and sends real signals to its worker processes, which
    have to run on this machine. Exit code 1 if a request was lost, or the pool did not recover.
    """
    numbers = _numbers(signals)
    with connect(url) as client:
        read_workers = _reader(client, model)
        count = _count(read_workers())
        _confirm(read_workers, yes)
        from mayfly_cli.drill.load import DrillLoad
        from mayfly_cli.drill.report import make_report

        load = DrillLoad(lambda: connect(url), _bodies(read_workers()[0].model, tokens))
        before = load.run_once()
        broken = next((stream.error for stream in before if stream.error), None)
        if broken is not None:
            fail(f"the server fails before the first signal: {broken}")
        planned = numbers * rounds
        sent = _send_all(client, read_workers, load, planned, clients, count, wait)
        texts = {stream.request: stream.text for stream in before}
        report = make_report(load.stop(), sent, texts, unsent=len(planned) - len(sent))
    if json:
        from json import dumps

        typer.echo(dumps(report.as_json(), indent=2))
    else:
        typer.echo("\n".join(report.lines()))
    raise typer.Exit(0 if report.passed else 1)


def _numbers(names: str) -> list[signal.Signals]:
    wanted = [name.strip().lower().removeprefix("sig") for name in names.split(",")]
    for name in wanted:
        if name not in SIGNALS:
            known = ", ".join(SIGNALS)
            raise typer.BadParameter(f"{name!r} is none of {known}", param_hint="--signals")
    return [signal.Signals[f"SIG{name.upper()}"] for name in wanted]


def _reader(client: httpx.Client, model: str | None) -> ReadWorkers:
    """Returns the function that asks the server for the workers of a model. Ends the command with
    an error if there are no workers, or if ``model`` is None and several models are served."""
    from mayfly_cli.drill.workers import workers_of

    def read() -> list[PoolWorker]:
        found = workers_of(get_json(client, "/mayfly/status"))
        return [worker for worker in found if model in (None, worker.model)]

    models = sorted({worker.model for worker in read()})
    if not models:
        fail(f"no worker of {model} is known" if model else "no worker is known")
    if len(models) > 1:
        fail(f"several models are served; name one with --model: {', '.join(models)}")
    return read


def _count(found: Sequence[PoolWorker]) -> int:
    """Returns the number of ready workers. Ends the command with an error if a slot (place of a
    node for one worker process) has no ready worker, or if no worker runs on this machine."""
    ready = [worker for worker in found if worker.ready]
    if len(ready) < len({worker.slot for worker in found}):
        fail("not all workers of the pool are ready: `mayfly status` shows their states")
    if not any(worker.is_local for worker in ready):
        fail("the workers do not run on this machine, so no signal can reach them from here")
    return len(ready)


def _confirm(read_workers: ReadWorkers, yes: bool) -> None:
    from mayfly_cli.drill.workers import has_traffic

    if yes or not has_traffic(read_workers, WATCH_S):
        return
    if not sys.stdin.isatty():
        fail("others use this pool; --yes drills it all the same")
    if not typer.confirm("Others use this pool, and their requests would be interrupted. Go on?"):
        raise typer.Exit(1)


def _bodies(model: str, tokens: int) -> list[dict[str, Any]]:
    return [
        {
            "model": model,
            "prompt": f"Drill number {number}. Once upon a time",
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        for number in range(PROMPTS)
    ]


def _send_all(
    client: httpx.Client,
    read_workers: ReadWorkers,
    load: DrillLoad,
    numbers: Sequence[signal.Signals],
    clients: int,
    count: int,
    wait_s: float,
) -> list[SentSignal]:
    """Starts the clients, and sends the signals ``numbers`` one after the other, each after all
    ``count`` workers are ready again. Stops early if no worker is ready, or if the workers do not
    recover, within ``wait_s`` seconds."""
    from mayfly_cli.drill.report import SentSignal
    from mayfly_cli.drill.workers import resume, signal_busiest, wait_full_capacity

    sent: list[SentSignal] = []
    load.start(clients)
    for number in numbers:
        time.sleep(WARM_UP_S)
        before = _continuations(client)
        found = signal_busiest(read_workers, number, wait_s)
        if found is None:
            break
        target, at = found
        typer.echo(f"{number.name} to {target.slot} (pid {target.pid})", err=True)
        full_at = wait_full_capacity(read_workers, target, count, wait_s)
        after = _continuations(client)
        continued = None if before is None or after is None else after - before
        sent.append(SentSignal(number.name, target.slot, target.pid, at, full_at, continued))
        if full_at is None:
            resume(target)
            break
    return sent


def _continuations(client: httpx.Client) -> int | None:
    """Reads from the server's metrics how many requests were continued on another worker, in all.
    Returns None if the metrics are not readable."""
    import httpx

    try:
        response = client.get("/metrics", timeout=10.0)
    except httpx.HTTPError:
        return None
    if response.status_code != 200:
        return None
    lines = response.text.splitlines()
    found = (line for line in lines if line.startswith("mayfly_continuations_total{"))
    return int(sum(float(line.rpartition(" ")[2]) for line in found))
