"""Asking nodes for their metrics, for as long as a scrape may take."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

from mayfly_server.metrics import Metrics

PATIENCE_S = 2.0
"""Prometheus gives up after ten by default."""


class Scrapes:
    """Who waits for which node's page. Any page of a node that comes meanwhile will do."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._waiting: defaultdict[str, list[asyncio.Future[bytes]]] = defaultdict(list)

    def answered(self, address: str, text: str) -> None:
        for waiting in self._waiting.pop(address, []):
            if not waiting.done():
                waiting.set_result(text.encode())

    async def answers(self, asked: Sequence[str]) -> list[bytes]:
        """The pages of the nodes that were asked just now, without those that don't answer."""
        if not asked:
            return []
        self._metrics.scrapes.inc(len(asked))
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in asked]
        for address, future in zip(asked, futures, strict=True):
            self._waiting[address].append(future)
        done, late = await asyncio.wait(futures, timeout=PATIENCE_S)
        self._metrics.scrape_failures.inc(len(late))
        for address, future in zip(asked, futures, strict=True):
            if future in late and future in self._waiting[address]:
                self._waiting[address].remove(future)
        return [future.result() for future in futures if future in done]
