"""docs/metrics.md lists every metric that exists, and no others."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "metrics.md"


async def test_the_tables_are_what_there_is() -> None:
    tables = runpy.run_path(str(ROOT / "scripts" / "manual" / "metric_tables.py"))["tables"]
    front_end, node = await tables()
    written = re.findall(r"^\| `mayfly_\w+` \| (?:counter|gauge|histogram) \|.*$", text(), re.M)
    assert written == [*front_end, *node], "run `make metrics`"


def test_every_count_of_failures_has_one_of_attempts() -> None:
    known = set(re.findall(r"^\| `(mayfly_\w+)` \| (?:counter|histogram)", text(), re.M))
    pairs = re.findall(r"^\| `(mayfly_\w+)` \| of `(mayfly_\w+)`", text(), re.M)
    assert len(pairs) >= 10
    for failures, attempts in pairs:
        assert failures in known
        assert attempts.removesuffix("_count") in known


def text() -> str:
    return DOCUMENT.read_text(encoding="utf-8")
