"""Measures what several different requests that break things, at once, cost the requests beside
them.

A round starts a server with a scripted model, lets 16 streams begin, sends 1, 2, 3 or 8 poisons at
once, and waits until all have ended. Prints, for each number of poisons and workers, the rounds in
which every innocent answer was complete and exact and every poison was named, the worker lives
that were used, and the longest gap of an innocent stream.

    python bench/poisons.py --rounds 20
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.poisons import POISONS, TALE, Outcome, model, play, served

ROUND_S = 900.0


def right(outcome: Outcome, poisons: list[str]) -> bool:
    named = outcome.codes == [POISONS[name][1] for name in poisons]
    return named and outcome.quarantined == len(poisons) and set(outcome.texts) == {TALE}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--poisons", type=int, nargs="+", default=[1, 2, 3, 8])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--innocents", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print("| poisons | workers | rounds | all right | lives lost | longest gap s |")
    print("|---|---|---|---|---|---|", flush=True)
    for workers in args.workers:
        for count in args.poisons:
            lives, gaps, good = [], [], 0
            for number in range(args.rounds):
                names = random.Random(f"{args.seed}/{number}/{count}").sample(list(POISONS), count)
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder)
                    with served(model(path / "model"), path, workers) as server:
                        outcome = play(server, names, args.innocents, ROUND_S)
                if right(outcome, names):
                    good += 1
                else:
                    print(f"wrong, {names}: {outcome}", file=sys.stderr, flush=True)
                lives.append(len(outcome.lost))
                gaps.append(outcome.longest_gap_s)
            print(
                f"| {count} | {workers} | {args.rounds} | {good} | {min(lives)} to {max(lives)} "
                f"| {min(gaps):.1f} to {max(gaps):.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
