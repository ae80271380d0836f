"""Compares Mayfly with other MLX servers (peers): their speed, or what clients see when the
inference process is killed, is stopped (SIGSTOP), or hangs in a forward pass like with a dead GPU.

    python bench/peers.py speed MODEL --peer vllm-mlx=VENV --peer rapid-mlx=VENV
    python bench/peers.py faults MODEL --peer vllm-mlx=VENV --only mayfly vllm-mlx

``mlx_lm.server`` is the one installed beside Mayfly; every other peer has a virtual environment of
its own, where it was installed from the package index. Prints Markdown tables. For speed, rounds of
all servers are interleaved, and the result is the ratio within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import hanging_model
from client import Round, chat, prompts
from hanging_model import HANG
from outages import FAILURES, Outage, strike
from servers import PEERS, Mayfly, Server, peer

SAMPLING: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.7, "top_p": 0.9},
}
TERM_S = 15.0
"""Seconds that a server has to end after SIGTERM."""

Start = Callable[[Path], Server]
"""A function that starts a server, which may write into the given folder."""


def versions(name: str, venv: Path) -> str:
    """The versions of the server's package, mlx and mlx-lm in a virtual environment, as text."""
    package = {"mlx_lm.server": "mlx-lm"}.get(name, name)
    script = (
        "import sys; from importlib.metadata import version; "
        "print(', '.join(f'{p} {version(p)}' for p in dict.fromkeys(sys.argv[1:])))"
    )
    command = [str(venv / "bin/python"), "-c", script, package, "mlx", "mlx-lm"]
    return subprocess.check_output(command, text=True).strip()


def mayfly(model: Path, *options: object) -> Start:
    return lambda folder: Mayfly(model, folder, *options)


def other(name: str, venv: Path, model: Path, *, rows: int = 32, restarted: bool = False) -> Start:
    return lambda folder: peer(name, venv, model, folder, rows=rows, restarted=restarted)


@contextlib.contextmanager
def started(start: Start) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        server = start(Path(folder))
        try:
            yield server
        finally:
            server.close()


# Speed


def speed(args: argparse.Namespace) -> None:
    rows = max(args.concurrency)
    starts = {
        "mayfly": mayfly(args.model, "--max-rows", rows),
        "mayfly, MLX's BLAS": mayfly(args.model, "--max-rows", rows, "--no-preload-blas"),
    }
    for name, venv in args.peers.items():
        starts[name] = other(name, venv, args.model, rows=rows)
    chosen = {name: start for name, start in starts.items() if args.chosen(name)}
    print("| work | c | who | tok/s | TTFT p50 / p99 ms | ITL p50 / p99 ms | mayfly / it |")
    print("|---|---|---|---|---|---|---|")
    seeds = itertools.count()  # no prompt is asked twice: no prefix is cached
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(started(start)) for name, start in chosen.items()}
        for concurrency in args.concurrency:
            for kind in args.kinds:
                rounds: dict[str, list[Round]] = {name: [] for name in servers}
                for number in range(-1, args.rounds):  # round -1 warms up and is not counted
                    seed = next(seeds)
                    for name, server in servers.items():
                        work = bodies(server, args, concurrency, kind, seed)
                        result = server.round(work, concurrency)
                        if number >= 0:
                            rounds[name].append(result)
                for name in rounds:
                    print(f"| {kind} | {concurrency} | {name} {speed_row(rounds, name)}")
                sys.stdout.flush()


def bodies(
    server: Server, args: argparse.Namespace, concurrency: int, kind: str, seed: int
) -> list[dict[str, object]]:
    texts = prompts(2 * concurrency, args.prompt_words, seed=seed)
    return [chat(server.model, text, args.max_tokens, **SAMPLING[kind]) for text in texts]


def speed_row(rounds: dict[str, list[Round]], name: str) -> str:
    own = rounds[name]
    median = statistics.median(r.tokens_per_second for r in own)
    ttft = [statistics.median(r.ttft(q) for r in own) * 1e3 for q in (0.5, 0.99)]
    itl = [statistics.median(r.itl(q) for r in own) * 1e3 for q in (0.5, 0.99)]
    pairs = zip(rounds.get("mayfly", []), own, strict=False)
    ratios = [a.tokens_per_second / b.tokens_per_second for a, b in pairs]
    ratio = "-" if name == "mayfly" or not ratios else spread(ratios, ".2f")
    return (
        f"| {median:.0f} | {ttft[0]:.0f} / {ttft[1]:.0f} | {itl[0]:.1f} / {itl[1]:.1f} | {ratio} |"
    )


def spread(values: list[float], form: str) -> str:
    if len(values) == 1:
        return f"{values[0]:{form}}"
    return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


# Faults


FAULTS: dict[str, Callable[[Path, Server], object]] = {
    "killed": lambda _, server: os.kill(server.computing(), signal.SIGKILL),
    "stopped": lambda _, server: os.kill(server.computing(), signal.SIGSTOP),
    "hangs": lambda model, _: (model / HANG).touch(),
}
"""Functions that inject a fault into a server's inference process; the model's folder comes from
:mod:`hanging_model`."""


def faults(args: argparse.Namespace) -> None:
    print(
        "| server | supervisor | it is | times | seconds without service | failed | cut "
        "| short | no answer | served | slowest s | /health meanwhile | SIGTERM ends it |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = hanging_model.build(args.model, Path(folder) / args.model.name)
        for fault, (name, supervisor, start) in itertools.product(
            args.faults, fault_starts(args, model)
        ):
            if fault != "killed" and supervisor == "restarts":
                continue  # a stopped or hanging process has not ended, so nothing restarts it
            with started(start) as server:
                outages = strikes(server, partial(FAULTS[fault], model), args)
                took = server.stop(TERM_S)
            ended = f"no, not in {TERM_S:.0f} s" if took is None else f"{took:.1f} s"
            print(
                f"| {name} | {supervisor} | {fault} {fault_row(outages, args)} {ended} |",
                flush=True,
            )


def fault_starts(args: argparse.Namespace, model: Path) -> Iterator[tuple[str, str, Start]]:
    if args.chosen("mayfly"):
        own = (model, "--trust-remote-code", "--workers")
        yield "mayfly, 2 workers", "its own", mayfly(*own, 2)
        yield "mayfly, 1 worker", "its own", mayfly(*own, 1)
    for name, venv in args.peers.items():
        if args.chosen(name):
            for supervisor in args.supervisors:
                restarted = supervisor == "restarts"
                yield name, supervisor, other(name, venv, model, restarted=restarted)


def strikes(
    server: Server, blow: Callable[[Server], object], args: argparse.Namespace
) -> list[Outage]:
    """Injects the fault ``args.times`` times, one after the other; stops early if the server does
    not answer again."""
    outages: list[Outage] = []
    while len(outages) < args.times and (not outages or outages[-1].back is not None):
        server.wait_whole()
        outages.append(asyncio.run(strike(server, blow, args.patience)))
    for error, count in sum((o.errors for o in outages), Counter()).most_common(3):
        print(f"  {count} times: {error[:200]}", file=sys.stderr)
    return outages


def fault_row(outages: list[Outage], args: argparse.Namespace) -> str:
    seconds = [o.seconds for o in outages if o.seconds is not None]
    without = spread(seconds, ".2f") if seconds else f"more than {args.patience:.0f}"
    counts = [sum(o.count(failure) for o in outages) for failure in FAILURES]
    served = sum(r.served for o in outages for r in o.requests)
    slowest = max(o.slowest for o in outages)
    health = sum((o.health for o in outages), Counter())
    words = ", ".join(f"{word} ×{count}" for word, count in health.most_common()) or "-"
    return (
        f"| {len(outages)} | {without} | {' | '.join(map(str, counts))} | {served} "
        f"| {slowest:.1f} | {words} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["speed", "faults"])
    parser.add_argument("model", type=Path, help="a model folder")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=VENV",
                        help=f"one of {', '.join(PEERS)}, and where it is installed")  # fmt: skip
    parser.add_argument("--only", nargs="+", help="servers to measure; by default all")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--kinds", nargs="+", default=["greedy"], choices=list(SAMPLING))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-words", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--supervisors", nargs="+", default=["none", "restarts"],
                        choices=["none", "restarts"], help="of the peers")  # fmt: skip
    parser.add_argument("--times", type=int, default=3, help="how often to inject each fault")
    parser.add_argument("--patience", type=float, default=60.0,
                        help="seconds to wait for the server to answer again")  # fmt: skip
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    args.model = args.model.resolve()
    args.peers = {"mlx_lm.server": Path(sys.prefix)} | {
        name: Path(venv).absolute() for name, _, venv in (each.partition("=") for each in args.peer)
    }
    if unknown := set(args.peers) - set(PEERS):
        parser.error(f"no such peer: {', '.join(unknown)}; there are {', '.join(PEERS)}")
    args.chosen = lambda name: not args.only or name.partition(",")[0] in args.only
    for name, venv in args.peers.items():
        print(f"{name}: {versions(name, venv)}", file=sys.stderr)
    {"speed": speed, "faults": faults}[args.what](args)


if __name__ == "__main__":
    main()
