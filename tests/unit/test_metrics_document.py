"""docs/metrics.md says what there is, all of it and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase

from mayfly_reaper.machine.memory import Room
from mayfly_reaper.metrics import NodeMetrics
from mayfly_server.app import FleetMetrics
from mayfly_server.dispatch.connector import Dialler
from mayfly_server.dispatch.fleet import Fleet
from mayfly_server.metrics import Metrics
from mayfly_server.settings import FrontSettings

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def row(name: str, kind: str, labels: tuple[str, ...], meaning: str) -> str:
    full = f"{name}_total" if kind == "counter" else name
    return f"| `{full}` | {kind} | {', '.join(labels)} | {meaning} |"


def of_front_end(metrics: Metrics) -> Iterator[str]:
    for each in vars(metrics).values():
        if isinstance(each, MetricWrapperBase):
            yield row(each._name, each._type, tuple(each._labelnames), each._documentation)


def of_families(families: Iterator[Metric]) -> Iterator[str]:
    for each in families:
        labels: tuple[str, ...] = each._labelnames  # type: ignore[attr-defined]
        yield row(each.name, each.type, tuple(labels), each.documentation)


async def test_the_tables_are_what_there_is() -> None:
    metrics = Metrics()
    fleet = Fleet(FrontSettings(nodes=()), metrics, Dialler())
    fleet.start()
    try:
        expected = [
            *of_front_end(metrics),
            *of_families(FleetMetrics(fleet).collect()),
            *of_families(NodeMetrics("node", lambda: Room(1)).collect()),
        ]
    finally:
        await fleet.close()
    written = re.findall(r"^\| `mayfly_\w+` \| (?:counter|gauge|histogram) \|.*$", text(), re.M)
    assert written == expected, "the tables should be:\n" + "\n".join(expected)


def test_every_count_of_failures_has_one_of_attempts() -> None:
    known = set(re.findall(r"^\| `(mayfly_\w+)` \| (?:counter|histogram)", text(), re.M))
    pairs = re.findall(r"^\| `(mayfly_\w+)` \| of `(mayfly_\w+)`", text(), re.M)
    assert len(pairs) >= 10
    for failures, attempts in pairs:
        assert failures in known
        assert attempts.removesuffix("_count") in known


def text() -> str:
    return DOCUMENT.read_text(encoding="utf-8")
