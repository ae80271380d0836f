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
        try:
            _, late = await asyncio.wait(futures, timeout=PATIENCE_S)
        finally:  # whoever asked may give up before the node answers, or before the time is over
            for address, future in zip(asked, futures, strict=True):
                self._forget(address, future)
        self._metrics.scrape_failures.inc(len(late))
        return [future.result() for future in futures if future not in late]

    def _forget(self, address: str, future: asyncio.Future[bytes]) -> None:
        waiting = self._waiting.get(address, [])
        if future in waiting:
            waiting.remove(future)
        if not waiting:
            self._waiting.pop(address, None)
