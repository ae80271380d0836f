"""Sends thousands of short requests while workers die: ``python bench/soak.py``.

The server has a tiny random-weight model; clients ask without a pause; and the next random fault is
injected as soon as every worker is READY again. Each answer is compared with the undisturbed
server's. Prints, as a row of the table in RESULTS.md, how many requests failed, how many answers
were wrong, how long streams paused at a fault, and how long the slowest answer took, which bounds
the wait of requests that had no token yet at a fault. The exit status is 1 if a single request
failed or a single answer was wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from mayfly_cli.commands.control import send_command
from mayfly_cli.drill.load import CompletionStream, DrillLoad
from mayfly_cli.drill.report import SentSignal, interruptions
from mayfly_cli.drill.workers import PoolWorker, send_signal, wait_full_capacity, workers_of
from mayfly_protocol.roster import Recycle

TESTS = Path(__file__).parent.parent / "tests"
sys.path.insert(0, str(TESTS))

from support.models import tiny  # noqa: E402
from support.server import free_port, wait_for  # noqa: E402

BUDGETS = {"silent_s": 3.0, "retry_s": 0.2, "retry_max_s": 1.0, "steady_s": 1.0, "drain_s": 1.0}
"""Time limits of the reaper (the workers' supervisor), in seconds. Faults follow each other so fast
here that with its default limits the reaper would wait minutes before it replaces a worker."""
SIGNALS = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGSTOP", "SIGTERM")
RECYCLE = "recycle"
PROMPTS = 40
WORDS = ("stone", "river", "cloud", "day")


def asks(model: str, seed: int) -> list[dict[str, Any]]:
    """Bodies of completion requests, greedy and sampled in turn, with answers of 8 to 32 tokens."""
    rng = random.Random(seed)
    return [
        {
            "model": model,
            "prompt": f"{number}: {' '.join(rng.choices(WORDS, k=8))}",
            "max_tokens": rng.randint(8, 32),
            "ignore_eos": True,
            "seed": number,
            **({"temperature": 0} if number % 2 else {"temperature": 0.9, "top_p": 0.95}),
        }
        for number in range(PROMPTS)
    ]


class Soak:
    def __init__(self, folder: Path, count: int, seed: int) -> None:
        self._folder = folder
        self._count = count
        self._rng = random.Random(seed)
        self._url = f"http://127.0.0.1:{free_port()}"
        self.signals: list[SentSignal] = []

    def __enter__(self) -> Soak:
        model = tiny.build(self._folder / "tiny")
        command = [
            sys.executable,
            str(TESTS / "support" / "doubles" / "run_mayfly.py"),
            json.dumps(BUDGETS),
        ]
        command += ["serve", str(model), "--workers", str(self._count), "--no-preload-blas"]
        command += ["--port", self._url.rpartition(":")[2], "--state-dir", str(self._state)]
        with (self._folder / "serve.log").open("w") as log:
            self._server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_for(self._whole, "every worker")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._server.send_signal(signal.SIGTERM)
        self._server.wait(60)

    @property
    def _state(self) -> Path:
        return self._folder / "state"

    def load(self, seed: int) -> DrillLoad:
        return DrillLoad(lambda: httpx.Client(base_url=self._url), asks("tiny", seed))

    def read_workers(self) -> list[PoolWorker]:
        return workers_of(httpx.get(f"{self._url}/mayfly/status", timeout=30).json())

    def _whole(self) -> bool:
        try:
            return sum(worker.ready for worker in self.read_workers()) == self._count
        except (httpx.HTTPError, ValueError):
            return False

    def next_fault(self) -> None:
        """Sends a random signal to a random worker, or recycles the worker (replaces it
        gracefully); returns when every worker is READY again."""
        target = self._rng.choice([worker for worker in self.read_workers() if worker.ready])
        how = self._rng.choice([*SIGNALS, RECYCLE])
        try:
            if how == RECYCLE:
                at = time.monotonic()
                send_command(self._state, Recycle(target.slot.partition("/")[2]))
            else:
                at = send_signal(target, signal.Signals[how])
        except ProcessLookupError:
            return
        full_at = wait_full_capacity(self.read_workers, target, self._count, 120.0)
        assert full_at is not None, f"{target.slot} did not come back after {how}"
        self.signals.append(SentSignal(how, target.slot, target.pid, at, full_at, None))


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("nan")


def wrong(streams: list[CompletionStream], right: dict[int, str]) -> list[CompletionStream]:
    return [s for s in streams if s.error is None and s.text != right[s.request]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="mayfly-soak-") as folder,
        Soak(Path(folder), options.workers, options.seed) as soak,
    ):
        right = {stream.request: stream.text for stream in soak.load(options.seed).run_once()}
        load = soak.load(options.seed)
        began = time.monotonic()
        load.start(options.concurrency, options.requests)
        while load.running:
            soak.next_fault()
            done = len(load.streams)
            print(f"\r{done} requests, {len(soak.signals)} faults", end="", file=sys.stderr)
        seconds = time.monotonic() - began
        streams = load.stop()
    print(file=sys.stderr)
    failed = [stream.error for stream in streams if stream.error is not None]
    other = wrong(streams, right)
    stood = [gap for each in soak.signals for gap in interruptions(streams, each.at)]
    recovery = [each.recovery_s for each in soak.signals if each.recovery_s is not None]
    slowest = max(
        (s.chunk_times[-1] - s.began for s in streams if s.chunk_times), default=float("nan")
    )
    kinds = Counter(each.signal for each in soak.signals)
    print(
        "| requests | seconds | faults | failed | wrong "
        "| interrupted | p50 | p99 | slowest answer | all READY p50 |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    print(
        f"| {len(streams)} | {seconds:.0f} | {len(soak.signals)} | {len(failed)} | {len(other)} "
        f"| {len(stood)} | {quantile(stood, 0.5):.2f} s | {quantile(stood, 0.99):.2f} s "
        f"| {slowest:.2f} s | {quantile(recovery, 0.5):.1f} s |"
    )
    print(", ".join(f"{count} {name}" for name, count in sorted(kinds.items())))
    for error in Counter(failed).most_common(5):
        print("failed:", *error)
    for stream in other[:5]:
        print(f"wrong: {stream.text!r} instead of {right[stream.request]!r}")
    sys.exit(1 if failed or other or len(streams) < options.requests else 0)


if __name__ == "__main__":
    main()
