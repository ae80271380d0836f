"""Judges every model module of the installed mlx-lm, and prints a table (``make models``).

Names of modules as arguments restrict it to these. Without, and where nothing differs, the table is
written into docs/models.md, too. Each module is judged in a process of its own, since the code of a
module may end it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.model_table import Verdict, judge  # noqa: E402
from support.models.configurations import modules  # noqa: E402

DOCUMENT = ROOT / "docs" / "models.md"
HEAD = "\n".join(
    ("| module | tokens | caches | cached at | prefilled | said at start |", "|---" * 6 + "|")
)
TABLE = r"<!-- table -->\n.*<!-- end -->"
JUDGE = "--judge"
SLOW_S = 600


def judged(module: str) -> Verdict:
    """Judges a module in a process of its own."""
    command = [sys.executable, __file__, JUDGE, module]
    # With another BLAS than MLX's own, near ties fall otherwise.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=SLOW_S, env=environment
        )
    except subprocess.TimeoutExpired:
        return Verdict(module, "ERROR", says=f"no result within {SLOW_S} s")
    if ran.returncode:
        last = ran.stderr.strip().splitlines()[-1:]
        return Verdict(module, "ERROR", says=f"ended with status {ran.returncode}: {last}")
    return Verdict(**json.loads(ran.stdout.splitlines()[-1]))


def row(verdict: Verdict) -> str:
    cells = (
        f"`{verdict.module}`",
        verdict.outcome,
        verdict.caches,
        verdict.prefixes,
        verdict.padding,
        verdict.says.replace("|", "\\|"),
    )
    return "| " + " | ".join(cells) + " |"


def summary(verdicts: Iterable[Verdict]) -> str:
    """Counts the outcomes in a sentence."""
    counts = Counter(verdict.outcome for verdict in verdicts)
    kinds = ", ".join(f"{counts[kind]} {kind}" for kind in ("same", "one row", "refused"))
    wrong = counts["DIFFERS"] + counts["ERROR"]
    return f"mlx-lm {version('mlx-lm')}: {counts.total()} modules: {kinds}, {wrong} wrong"


def main() -> int:
    if sys.argv[1:2] == [JUDGE]:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(asdict(judge(sys.argv[2], Path(folder)))))  # noqa: T201
        return 0
    chosen = sys.argv[1:]
    verdicts = []
    print(HEAD)  # noqa: T201
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for verdict in pool.map(judged, chosen or modules()):
            verdicts.append(verdict)
            print(row(verdict), flush=True)  # noqa: T201
    print(summary(verdicts))  # noqa: T201
    if not all(verdict.right for verdict in verdicts):
        return 1
    if not chosen:
        table = "\n".join([summary(verdicts) + ".", "", HEAD, *map(row, verdicts)])
        text = DOCUMENT.read_text(encoding="utf-8")
        new = re.sub(
            TABLE, lambda _: f"<!-- table -->\n{table}\n<!-- end -->", text, flags=re.DOTALL
        )
        DOCUMENT.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
