"""What a front end knows of its nodes, as metrics: made when somebody asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mayfly_server.pool.fleet import Fleet


class FleetMetrics(Collector):
    """To be registered once the fleet listens; for its event loop's thread."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "mayfly_node_up", "Whether a node's rosters keep coming.", labels=["node"]
        )
        heard: dict[str, bool] = {}
        for roster, silent in self._fleet.nodes():  # several may have one name: all of them
            heard[roster.node] = heard.get(roster.node, True) and not silent
        for node, is_up in heard.items():
            up.add_metric([node], int(is_up))
        ready = GaugeMetricFamily(
            "mayfly_workers_ready",
            "Workers that this front end can give a request to now.",
            labels=["model"],
        )
        counts = Counter(self._fleet.ready_models())
        for model in self._fleet.models():
            ready.add_metric([model.name], counts[model.name])
        refused = GaugeMetricFamily(
            "mayfly_quarantine_entries", "Requests that are refused because workers died of them."
        )
        refused.add_metric([], len(self._fleet.quarantine))
        yield from (up, ready, refused)
