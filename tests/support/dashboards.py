"""Reads the Grafana dashboards of ``grafana/`` and their Prometheus queries."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GRAFANA = Path(__file__).parents[2] / "grafana"


def dashboards() -> dict[str, Any]:
    files = sorted((GRAFANA / "dashboards").glob("*.json"))
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


def queries() -> Iterator[tuple[str, str]]:
    """Yields every query of every dashboard panel: its place (dashboard, panel, letter) and its
    PromQL text."""
    for name, dashboard in dashboards().items():
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                yield f"{name}: {panel['title']} ({target['refId']})", target["expr"]


def variables() -> Iterator[tuple[str, str, str]]:
    """Yields every dashboard variable whose values come from Prometheus: its place (dashboard and
    name), its metric and its label."""
    for name, dashboard in dashboards().items():
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                inside = variable["query"].removeprefix("label_values(").removesuffix(")")
                metric, _, label = inside.partition(", ")
                yield f"{name}: {variable['name']}", metric, label


def filled_in(query: str, interval: str) -> str:
    """Returns a panel's query with its variables filled in, as Grafana sends it when every node,
    slot and model is selected."""
    for variable in ("node", "slot", "model"):
        query = query.replace(f"${variable}", ".*")
    return query.replace("$__rate_interval", interval)
