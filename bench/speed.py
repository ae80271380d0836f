"""Compares the speed of mlx-lm's bare generator loop (A), Mayfly (B) and mlx_lm.server (C).

Rounds are interleaved (A B C A B C ...), because a machine's speed drifts: the result is the ratio
within a round, given as the median over rounds with its spread. Prints a Markdown table.

    python bench/speed.py MODEL_FOLDER
    python bench/speed.py --random 1b --tokenizer FOLDER
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from client import Round, Timing, chat, prompts
from servers import Mayfly, peer

HERE = Path(__file__).parent
NAMES = {"A": "in-process", "B": "mayfly", "C": "mlx_lm.server"}


@dataclass
class Workload:
    name: str
    concurrency: int
    options: dict[str, object]
    prefix_words: int = 0
    rounds: dict[str, list[Round]] = field(default_factory=lambda: {k: [] for k in NAMES})


class InProcess:
    """Generation without a server, in a process of its own: mlx-lm's generator (``kind`` "loop") or
    Mayfly's engine ("engine")."""

    def __init__(self, model: Path, kind: str = "loop") -> None:
        self.model = model.name
        self._process = subprocess.Popen(
            [sys.executable, HERE / "inprocess.py", model, kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def round(self, bodies: list[dict[str, object]], concurrency: int) -> Round:
        assert self._process.stdin and self._process.stdout
        order = {"bodies": bodies, "concurrency": concurrency}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return Round(answer["seconds"], [Timing(**t) for t in answer["timings"]])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def contenders(model: Path, rows: int, which: str, folder: Path) -> Iterator[dict[str, Any]]:
    running: dict[str, Any] = {}
    try:
        if "A" in which:
            running["A"] = InProcess(model)
        if "B" in which:
            running["B"] = Mayfly(model, folder, "--max-rows", max(rows, 2))
        if "C" in which:
            running["C"] = peer("mlx_lm.server", Path(sys.prefix), model, folder, rows=rows)
        yield running
    finally:
        for contender in running.values():
            contender.close()


def bodies(
    workload: Workload, args: argparse.Namespace, seed: int, model: str
) -> list[dict[str, object]]:
    texts = prompts(
        max(workload.concurrency * args.requests_per_client, args.least_requests),
        args.prompt_words,
        prefix_words=workload.prefix_words,
        seed=seed,
    )
    return [chat(model, text, args.max_tokens, **workload.options) for text in texts]


def measure(args: argparse.Namespace, model: Path) -> list[Workload]:
    sampled = {"temperature": 0.7, "top_p": 0.9}
    kinds: list[tuple[str, dict[str, object], int]] = [
        ("greedy", {"temperature": 0}, 0),
        ("sampled", dict(sampled), 0),
        ("greedy, shared prefix", {"temperature": 0}, args.prefix_words),
    ]
    workloads = [
        Workload(name, c, options, prefix)
        for c in args.concurrency
        for name, options, prefix in kinds
        if name in args.kinds
    ]
    rows = max(args.concurrency)
    with (
        tempfile.TemporaryDirectory() as folder,
        contenders(model, rows, args.which, Path(folder)) as who,
    ):
        for workload in workloads:
            for number in range(-1, args.rounds):  # round -1 warms up and is not counted
                for key, contender in who.items():
                    work = bodies(workload, args, number + 10, contender.model)
                    result = contender.round(work, workload.concurrency)
                    if number >= 0:
                        workload.rounds[key].append(result)
            report_line(workload, args.which)
    return workloads


def report_line(workload: Workload, which: str) -> None:
    for key in which:
        rounds = workload.rounds[key]
        speed = statistics.median(r.tokens_per_second for r in rounds)
        ttft = [statistics.median(r.ttft(q) for r in rounds) * 1e3 for q in (0.5, 0.99)]
        itl = [statistics.median(r.itl(q) for r in rounds) * 1e3 for q in (0.5, 0.99)]
        print(
            f"| {workload.name} | {workload.concurrency} | {NAMES[key]} | {speed:.0f} "
            f"| {ttft[0]:.0f} / {ttft[1]:.0f} | {itl[0]:.1f} / {itl[1]:.1f} "
            f"| {ratio(workload, key, 'A')} | {ratio(workload, key, 'C')} |",
            flush=True,
        )


def ratio(workload: Workload, key: str, base: str) -> str:
    """The ratio of one contender's tokens per second to another's: median and range over rounds."""
    pairs = zip(workload.rounds[key], workload.rounds[base], strict=False)
    ratios = [a.tokens_per_second / b.tokens_per_second for a, b in pairs]
    if key == base or not ratios:
        return "-"
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, help="a model folder")
    parser.add_argument(
        "--random", choices=["1b", "8b", "tiny"], help="build a random-weight model instead"
    )
    parser.add_argument(
        "--tokenizer", type=Path, help="model folder whose tokenizer a random model takes"
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--kinds", nargs="+", default=["greedy", "sampled", "greedy, shared prefix"]
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests-per-client", type=int, default=2)
    parser.add_argument(
        "--least-requests", type=int, default=8, help="requests of a round with few clients"
    )
    parser.add_argument("--prompt-words", type=int, default=100)
    parser.add_argument("--prefix-words", type=int, default=800)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument(
        "--which", default="ABC", help="contenders: A in-process, B Mayfly, C mlx_lm"
    )
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if args.random:
            model = Path(folder) / f"random-{args.random}"
            subprocess.run(
                [sys.executable, HERE / "random_llama.py", args.random, args.tokenizer, model],
                check=True,
            )
        print(
            "| work | c | who | tok/s | TTFT p50 / p99 ms | ITL p50 / p99 ms "
            "| / in-process | / mlx_lm.server |\n|---|---|---|---|---|---|---|---|",
            flush=True,
        )
        measure(args, model)


if __name__ == "__main__":
    main()
