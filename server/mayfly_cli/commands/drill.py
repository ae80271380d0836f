"""``mayfly drill``: real signals to real workers, under load, on your own deployment."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mayfly_cli.commands.client import DEFAULT_URL, Url, connect, get_json
from mayfly_cli.failure import fail

if TYPE_CHECKING:
    import httpx

    from mayfly_cli.drill.load import Load
    from mayfly_cli.drill.report import Strike
    from mayfly_cli.drill.workers import Look, Worker

SIGNALS = ("kill", "segv", "abrt", "stop")
PROMPTS = 8
WATCH_S = 1.5
WARM_UP_S = 1.0
"""So that streams are under way when the first signal comes."""


def drill(
    url: Url = DEFAULT_URL,
    model: Annotated[
        str | None, typer.Option(help="Whose workers to strike, where several models are served.")
    ] = None,
    signals: Annotated[
        str, typer.Option(help=f"Which signals, in this order: some of {','.join(SIGNALS)}.")
    ] = ",".join(SIGNALS),
    rounds: Annotated[int, typer.Option(help="How often all of them.", min=1)] = 1,
    clients: Annotated[int, typer.Option(help="Streams at a time.", min=1, max=256)] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=2)] = 128,
    wait: Annotated[
        float, typer.Option(help="Seconds that the pool may take to come back each time.", min=1)
    ] = 300.0,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask, even if others use the pool.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Kill workers on purpose, and see whether any client notices.

    It streams completions from a running server and sends real signals to its worker processes,
    which have to run on this machine. Fails if a request was lost, or the pool did not come back.
    """
    numbers = _numbers(signals)
    with connect(url) as client:
        look = _look(client, model)
        count = _count(look())
        _confirm(look, yes)
        from mayfly_cli.drill.load import Load
        from mayfly_cli.drill.report import report

        load = Load(lambda: connect(url), _asks(look()[0].model, tokens))
        before = load.once()
        broken = next((stream.error for stream in before if stream.error), None)
        if broken is not None:
            fail(f"the server fails before anything was struck: {broken}")
        asked = numbers * rounds
        strikes = _strike_all(client, look, load, asked, clients, count, wait)
        texts = {stream.ask: stream.text for stream in before}
        found = report(load.stop(), strikes, texts, unsent=len(asked) - len(strikes))
    if json:
        from json import dumps

        typer.echo(dumps(found.as_json(), indent=2))
    else:
        typer.echo("\n".join(found.lines()))
    raise typer.Exit(0 if found.passed else 1)


def _numbers(names: str) -> list[signal.Signals]:
    wanted = [name.strip().lower().removeprefix("sig") for name in names.split(",")]
    for name in wanted:
        if name not in SIGNALS:
            known = ", ".join(SIGNALS)
            raise typer.BadParameter(f"{name!r} is none of {known}", param_hint="--signals")
    return [signal.Signals[f"SIG{name.upper()}"] for name in wanted]


def _look(client: httpx.Client, model: str | None) -> Look:
    from mayfly_cli.drill.workers import workers

    def look() -> list[Worker]:
        found = workers(get_json(client, "/mayfly/status"))
        return [worker for worker in found if model in (None, worker.model)]

    models = sorted({worker.model for worker in look()})
    if not models:
        fail(f"no worker of {model} is known" if model else "no worker is known")
    if len(models) > 1:
        fail(f"several models are served; name one with --model: {', '.join(models)}")
    return look


def _count(found: Sequence[Worker]) -> int:
    """How many workers the pool has when it is whole."""
    ready = [worker for worker in found if worker.ready]
    if len(ready) < len({worker.slot for worker in found}):
        fail("the pool is not whole: `mayfly status` says what its workers are doing")
    if not any(worker.here for worker in ready):
        fail("its workers do not run on this machine, so no signal can reach them from here")
    return len(ready)


def _confirm(look: Look, yes: bool) -> None:
    from mayfly_cli.drill.workers import has_traffic

    if yes or not has_traffic(look, WATCH_S):
        return
    if not sys.stdin.isatty():
        fail("others use this pool; --yes drills it all the same")
    if not typer.confirm("Others use this pool, and their requests would be interrupted. Go on?"):
        raise typer.Exit(1)


def _asks(model: str, tokens: int) -> list[dict[str, Any]]:
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


def _strike_all(
    client: httpx.Client,
    look: Look,
    load: Load,
    numbers: Sequence[signal.Signals],
    clients: int,
    count: int,
    wait_s: float,
) -> list[Strike]:
    import time

    from mayfly_cli.drill.report import Strike
    from mayfly_cli.drill.workers import full_capacity, strike_busiest, wake

    strikes: list[Strike] = []
    load.start(clients)
    for number in numbers:
        time.sleep(WARM_UP_S)
        continued = _continuations(client)
        struck = strike_busiest(look, number, wait_s)
        if struck is None:
            break
        target, at = struck
        typer.echo(f"{number.name} to {target.slot} (pid {target.pid})", err=True)
        full_at = full_capacity(look, target, count, wait_s)
        after = _continuations(client)
        known = None if continued is None or after is None else after - continued
        strikes.append(Strike(number.name, target.slot, target.pid, at, full_at, known))
        if full_at is None:
            wake(target)
            break
    return strikes


def _continuations(client: httpx.Client) -> int | None:
    """None where metrics are not for us."""
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
