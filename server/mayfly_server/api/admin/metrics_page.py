"""The route ``GET /metrics``: the front end's metrics in Prometheus's text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mayfly_server.api.dependencies import FrontDep
from mayfly_server.dispatch.fleet import Fleet

router = APIRouter(include_in_schema=False)


class FleetMetrics(Collector):
    """Gauges of the fleet (nodes that report, workers ready, requests in quarantine), computed at
    each scrape. Register the collector after the fleet has opened its sockets, and collect it on
    the thread of the fleet's event loop."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "mayfly_node_up",
            "1 while the node's periodic status messages reach this front end, otherwise 0.",
            labels=["node"],
        )
        heard: dict[str, bool] = {}
        for roster, silent in self._fleet.nodes():  # nodes may share a name: up if all of them are
            heard[roster.node] = heard.get(roster.node, True) and not silent
        for node, is_up in heard.items():
            up.add_metric([node], int(is_up))
        ready = GaugeMetricFamily(
            "mayfly_workers_ready",
            "Workers of the model that accept requests from this front end now.",
            labels=["model"],
        )
        counts = Counter(self._fleet.ready_models())
        for model in self._fleet.models():
            ready.add_metric([model.name], counts[model.name])
        refused = GaugeMetricFamily(
            "mayfly_quarantine_entries",
            "Requests that are refused for a while because workers have died of them.",
        )
        refused.add_metric([], len(self._fleet.quarantined()))
        yield from (up, ready, refused)


@router.get("/metrics")
async def metrics_page(front: FrontDep) -> Response:
    """Answers with the front end's metrics and, where the setting ``node_metrics`` is on, with the
    metrics of its nodes."""
    pages = [front.metrics.exposition()]
    if front.settings.node_metrics:
        pages += await front.fleet.node_metrics()
    return Response(b"".join(pages), media_type=CONTENT_TYPE_LATEST)
