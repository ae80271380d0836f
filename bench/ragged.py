"""Measures how much one long sequence slows down the decoding of short ones beside it.

Decodes seven sequences of 50 tokens and one of 3000 (``--long``) in the engine itself, without a
server: once padded to one batch, once with the long one in a batch of its own, and once as a server
does, for which the engine picks the cheaper of the two by its own estimate. Prints the median time
of a step.

    python bench/ragged.py MODEL_FOLDER
"""

from __future__ import annotations

import argparse
from pathlib import Path

from decoding import APART, TOGETHER, Decoder, spread

SHORT = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a model folder")
    parser.add_argument("--long", type=int, nargs="+", default=[3000], metavar="TOKENS")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    decoder = Decoder.of(args.model)
    cases = {f"8 of {SHORT}": ([SHORT] * 8, TOGETHER)}
    for long in args.long:
        mixed, name = [SHORT] * 7 + [long], f"7 of {SHORT} and 1 of {long}"
        cases |= {
            f"1 of {long}": ([long], TOGETHER),
            f"{name}, one batch": (mixed, TOGETHER),
            f"{name}, two batches": (mixed, APART),
            f"{name}, as served": (mixed, decoder.price),
        }
    took: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(args.rounds):
        for name, (lengths, price) in cases.items():
            took[name].append(decoder.step_ms(lengths, args.steps, price=price))
    print(f"A forward pass counts as {decoder.price:.0f} tokens of cache.\n")
    print("| rows | step ms: median (range) over rounds |\n|---|---|")
    for name, values in took.items():
        print(f"| {name} | {spread(values)} |")


if __name__ == "__main__":
    main()
