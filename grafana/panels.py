"""Classes that describe Grafana's panels and dashboards, and their rendering as Grafana's JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24
"""Width of a dashboard in Grafana's grid columns."""


@dataclass(frozen=True)
class Panel:
    """A panel of a Grafana dashboard. ``queries`` are pairs of a PromQL query and its legend;
    ``width`` is in grid columns, of which a dashboard has 24."""

    title: str
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 12
    description: str = ""
    stacked: bool = False


@dataclass(frozen=True)
class Dashboard:
    name: str
    title: str
    panels: Sequence[Panel]
    by: Sequence[str] = ("node", "model")
    """Names of the metric labels by which the dashboard's user can filter."""


def rendered(dashboard: Dashboard) -> str:
    """Renders a dashboard as the JSON that Grafana reads."""
    model = {
        "uid": f"mayfly-{dashboard.name}",
        "title": dashboard.title,
        "tags": ["mayfly"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [
            {
                "type": "dashboards",
                "title": "Mayfly",
                "tags": ["mayfly"],
                "asDropdown": True,
                "keepTime": True,
                "includeVars": True,
            }
        ],
        "templating": {"list": [_source(), *map(_variable, dashboard.by)]},
        "panels": list(_laid_out(dashboard.panels)),
    }
    return json.dumps(model, indent=2) + "\n"


def _source() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
    }


def _variable(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": SOURCE,
        "query": f"label_values(mayfly_worker_state, {name})",
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _laid_out(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """Places panels in Grafana's grid, from left to right, then down; returns their JSON."""
    found: list[dict[str, Any]] = []
    x = y = below = 0
    for number, panel in enumerate(panels, start=1):
        height = 4 if panel.kind == "stat" else 8
        if x + panel.width > WIDTH:
            x, y = 0, below
        found.append(
            _panel(panel, number) | {"gridPos": {"x": x, "y": y, "w": panel.width, "h": height}}
        )
        x += panel.width
        below = max(below, y + height)
    return found


def _panel(panel: Panel, number: int) -> dict[str, Any]:
    custom = {"fillOpacity": 10, "showPoints": "never"}
    if panel.stacked:
        custom |= {"fillOpacity": 40, "stacking": {"mode": "normal"}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "custom": custom if panel.kind == "timeseries" else {},
            },
            "overrides": [],
        },
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
            for i, (expr, legend) in enumerate(panel.queries)
        ],
    }
