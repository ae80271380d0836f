"""``GET /metrics``, for Prometheus."""

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
    """The fleet's state as metrics, made at each scrape. To be registered once the fleet listens,
    and collected on its event loop's thread."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "mayfly_node_up", "1 while rosters of the node arrive, otherwise 0.", labels=["node"]
        )
        heard: dict[str, bool] = {}
        for roster, silent in self._fleet.nodes():  # nodes may share a name: up if all are
            heard[roster.node] = heard.get(roster.node, True) and not silent
        for node, is_up in heard.items():
            up.add_metric([node], int(is_up))
        ready = GaugeMetricFamily(
            "mayfly_workers_ready",
            "Workers that this front end can send a request to now.",
            labels=["model"],
        )
        counts = Counter(self._fleet.ready_models())
        for model in self._fleet.models():
            ready.add_metric([model.name], counts[model.name])
        refused = GaugeMetricFamily(
            "mayfly_quarantine_entries",
            "Requests in quarantine.",
        )
        refused.add_metric([], len(self._fleet.quarantined()))
        yield from (up, ready, refused)


@router.get("/metrics")
async def metrics_page(front: FrontDep) -> Response:
    """This front end's metrics and, if the settings say so, those of its nodes."""
    pages = [front.metrics.exposition()]
    if front.settings.node_metrics:
        pages += await front.fleet.node_metrics()
    return Response(b"".join(pages), media_type=CONTENT_TYPE_LATEST)
