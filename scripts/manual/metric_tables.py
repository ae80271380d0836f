"""Writes the tables of docs/metrics.md anew, from the metrics themselves (``make metrics``)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase

from mayfly_reaper.machine.memory import MachineMemory
from mayfly_reaper.metrics import NodeMetrics
from mayfly_server.api.admin.metrics_page import FleetMetrics
from mayfly_server.dispatch.connector import Connector
from mayfly_server.dispatch.fleet import Fleet
from mayfly_server.metrics import Metrics
from mayfly_server.settings import FrontSettings

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = r"^\| `mayfly_\w+` \| (?:counter|gauge|histogram) \|.*$"


def _row(name: str, kind: str, labels: Iterable[str], meaning: str) -> str:
    full = f"{name}_total" if kind == "counter" else name
    return f"| `{full}` | {kind} | {', '.join(labels)} | {meaning} |"


def _families(families: Iterable[Metric]) -> Iterator[str]:
    for each in families:
        labels: tuple[str, ...] = each._labelnames  # type: ignore[attr-defined]
        yield _row(each.name, each.type, labels, each.documentation)


async def tables() -> tuple[list[str], list[str]]:
    """The rows of the front end's table, and of that of the reaper and its workers."""
    metrics = Metrics()
    fleet = Fleet(FrontSettings(nodes=()), metrics, Connector())
    fleet.start()
    try:
        front_end = [
            *(
                _row(each._name, each._type, each._labelnames, each._documentation)
                for each in vars(metrics).values()
                if isinstance(each, MetricWrapperBase)
            ),
            *_families(FleetMetrics(fleet).collect()),
        ]
    finally:
        await fleet.close()
    return front_end, list(_families(NodeMetrics("node", lambda: MachineMemory(1)).collect()))


def main() -> None:
    front_end, node = ("\n".join(rows) + "\n" for rows in asyncio.run(tables()))
    between = re.split(rf"(?:{ROW}\n)+", DOCUMENT.read_text(encoding="utf-8"), flags=re.M)
    before, middle, after = between
    DOCUMENT.write_text(f"{before}{front_end}{middle}{node}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
