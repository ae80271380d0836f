"""The fleet: every node and worker that a front end knows of, and its connections to them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import structlog
import zmq

from mayfly_protocol.lifecycle import ModelCard
from mayfly_protocol.roster import (
    AskMetrics,
    FromNode,
    MetricsText,
    Quarantine,
    Quarantined,
    Roster,
)
from mayfly_protocol.serving import PING_INTERVAL_S
from mayfly_protocol.transport.addresses import AddressError, NodeAddress, node_address
from mayfly_protocol.transport.zap import Refusals
from mayfly_server.dispatch.availability import Availability, availability
from mayfly_server.dispatch.connector import Connector
from mayfly_server.dispatch.link import Context, Link, State
from mayfly_server.dispatch.node_link import NodeLink
from mayfly_server.dispatch.quarantine import QuarantineView, unrelated
from mayfly_server.dispatch.rosters import Incarnation, Rosters, Slot
from mayfly_server.dispatch.routing import Candidate, choose
from mayfly_server.metrics import THIS_FRONT_END, Metrics, RefusalCounts
from mayfly_server.settings import FrontSettings

SCRAPE_WAIT_S = 2.0
"""Seconds that a node may take to send its metrics; Prometheus gives up after 10 by default."""

_log = structlog.get_logger(__name__)


class PendingScrapes:
    """Waits for nodes' metrics pages. Any page of a node that comes meanwhile answers a scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._waiting: defaultdict[str, list[asyncio.Future[bytes]]] = defaultdict(list)

    def received(self, address: str, text: str) -> None:
        """Takes a page that has come from a node."""
        for waiting in self._waiting.pop(address, []):
            if not waiting.done():
                waiting.set_result(text.encode())

    async def pages(self, asked: Sequence[str]) -> list[bytes]:
        """Waits for the pages of nodes that were asked just now; leaves out those that are late."""
        if not asked:
            return []
        self._metrics.scrapes.inc(len(asked))
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in asked]
        for address, future in zip(asked, futures, strict=True):
            self._waiting[address].append(future)
        try:
            _, late = await asyncio.wait(futures, timeout=SCRAPE_WAIT_S)
        finally:  # the caller may give up before the node answers, or before the time is over
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


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that some slot serves, or will. ``card`` is None until a worker has loaded it."""

    name: str
    card: ModelCard | None


class Fleet:
    """Listens to the nodes from :meth:`start` to :meth:`close`, both on one running event loop.

    Attributes:
        leaving: no new request should come to this front end any more.
        closing: no request may stay here either.
        rosters: the nodes' latest rosters.
    """

    def __init__(self, settings: FrontSettings, metrics: Metrics, connector: Connector) -> None:
        self.leaving = False
        self.closing = False
        self._settings = settings
        self._metrics = metrics
        self.rosters = Rosters(settings.roster_silence_s)
        self._links: dict[Incarnation, Link] = {}
        self._context: Context = zmq.Context()
        self._quarantine = QuarantineView()
        self._scrapes = PendingScrapes(metrics)
        self._connector = connector
        self._refusals = Refusals(_log.warning)
        self._refused = RefusalCounts(metrics.wire_refusals)
        self._nodes: dict[str, NodeLink] = {}
        self._announced = False
        self._change = asyncio.Event()
        self._pinging: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connects to the nodes of the settings."""
        self._loop = asyncio.get_running_loop()
        self.use_nodes(self._settings.nodes)
        self._pinging = asyncio.create_task(self._ping_forever(), name="ping the workers")

    def announce(self) -> None:
        """Tells every node, present and future, that this front end serves."""
        self._announced = True
        for node in self._nodes.values():
            node.announce()

    def use_nodes(self, addresses: Iterable[str]) -> None:
        """Replaces the nodes to listen to. Requests on the workers of a node that is dropped go on
        elsewhere.

        Raises:
            AddressError: one of the addresses cannot be used; nothing has changed.
        """
        wanted = {text: node_address(text) for text in addresses}
        fresh = [text for text in wanted if text not in self._nodes]
        for text in fresh:
            self._connector.control(wanted[text])
        for text in [text for text in self._nodes if text not in wanted]:
            self._nodes.pop(text).close()
            self.rosters.forget(text)
            self._quarantine.forget(text)
            for link in [link for link in self._links.values() if link.slot.address == text]:
                link.lose("node removed from the list")
        for text in fresh:
            self._nodes[text] = self._connect_node(text, wanted[text])

    def end_requests(self) -> None:
        """Ends every request that has not ended yet with an error, at once."""
        self.leaving = self.closing = True
        for link in list(self._links.values()):
            link.close("front end shuts down")
        self._notify_change()

    async def close(self) -> None:
        """Ends every request and closes all connections."""
        self.end_requests()
        if self._pinging is not None:
            self._pinging.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._pinging
        for node in self._nodes.values():
            node.close()
        self._context.destroy(linger=0)

    async def node_metrics(self) -> list[bytes]:
        """The nodes' own metrics: the page of each node that answers soon."""
        asked = [address for address, node in self._nodes.items() if node.send(AskMetrics())]
        return await self._scrapes.pages(asked)

    # State of the fleet

    def nodes(self) -> Iterator[tuple[Roster, bool]]:
        """Yields every node's latest roster, and whether the node has been silent since."""
        return self.rosters.nodes(self._loop.time())

    def models(self) -> list[ServedModel]:
        """All served models by name, loaded or not."""
        cards: dict[str, ModelCard | None] = {}
        for slot in self.rosters.slots(self._loop.time()):
            cards[slot.view.model] = cards.get(slot.view.model) or slot.view.card
        return [ServedModel(name, cards[name]) for name in sorted(cards)]

    def machine_is_failing(self) -> bool:
        """Tells whether a node lost workers of late that no single request can be blamed for."""
        return any(
            unrelated([(*loss.suspects, *loss.marked) for loss in roster.losses])
            for roster, _ in self.nodes()
        )

    def quarantined(self) -> list[Quarantined]:
        """All requests in quarantine, by the nodes' rosters."""
        return self._quarantine.entries(self._loop.time())

    def quarantine_kind(self, fingerprint: Callable[[], str]) -> str | None:
        """The kind of fault that a request is in quarantine for; None if it is not. The fingerprint
        is computed only where anything is in quarantine."""
        if self._quarantine.empty:
            return None
        return self._quarantine.kind(fingerprint(), self._loop.time())

    def quarantine(self, fingerprint: str, kind: str) -> None:
        """Puts a request into quarantine: every front end refuses it for a while."""
        ttl_s = self._settings.quarantine_ttl_s
        if ttl_s > 0:
            self._quarantine.add(fingerprint, kind, self._loop.time())
            for node in self._nodes.values():
                node.send(Quarantine(fingerprint, kind, ttl_s))

    def availability(self, model: str | None = None) -> Availability:
        """The prospects of one model, or of any model where none is named."""
        slots = self.rosters.slots(self._loop.time())
        connected = {slot.incarnation for slot, _ in self._usable()}
        return availability([slot for slot in slots if model in (None, slot.view.model)], connected)

    def ready_workers(self) -> int:
        """The number of workers that can take a request now."""
        return sum(1 for _ in self._usable())

    def ready_models(self) -> list[str]:
        """The model of each worker that can take a request now."""
        return [slot.view.model for slot, _ in self._usable()]

    def stalled_models(self) -> dict[str, float]:
        """The models whose workers all have something to do and make no progress, with the seconds
        since the last one did. Those workers may be lost."""
        links: dict[str, list[Link]] = {}
        for slot, link in self._usable():
            links.setdefault(slot.view.model, []).append(link)
        return {
            model: min(link.stalled_for_s for link in its)
            for model, its in links.items()
            if all(link.stalled for link in its)
        }

    def choose(
        self,
        model: str,
        key: bytes | None,
        *,
        digest: str | None = None,
        refused: Collection[Incarnation] = (),
    ) -> Link | None:
        """Chooses the worker for a request; None if there is none. A worker on trial gets a single
        request at a time; a stalled one gets none while others make progress.

        With a ``digest``, only workers that would continue another one's text exactly qualify.
        """
        candidates = [
            Candidate(slot.name, link.load, link, slot.capacity)
            for slot, link in self._usable()
            if slot.view.model == model
            and slot.incarnation not in refused
            and not (slot.view.trial and link.load)
            and (digest is None or (slot.view.card and slot.view.card.digest == digest))
        ]
        moving = [candidate for candidate in candidates if not candidate.worker.stalled]
        best = choose(moving or candidates, key)
        return best.worker if best else None

    @property
    def next_change(self) -> asyncio.Event:
        """An event that is set when the next roster comes or a link's state changes."""
        return self._change

    async def wait_for_change(self, timeout_s: float, since: asyncio.Event | None = None) -> None:
        """Returns at the next change or when the time is over. With ``since``, a former
        :attr:`next_change`, changes after that count, too."""
        event = since or self._change
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await event.wait()

    @property
    def partly_known(self) -> bool:
        """True while some node has not said yet what it serves."""
        return any(address not in self.rosters for address in self._nodes)

    async def wait_for_roster(self, timeout_s: float) -> bool:
        """Waits for the first roster after the start. Returns whether there is one."""
        deadline = self._loop.time() + timeout_s
        while not self.rosters and not self.closing and (left := deadline - self._loop.time()) > 0:
            await self.wait_for_change(left)
        return bool(self.rosters)

    # Messages and connections

    def _usable(self) -> Iterator[tuple[Slot, Link]]:
        for slot in self.rosters.slots(self._loop.time()):
            link = self._links.get(slot.incarnation)
            if slot.view.state == "ready" and not slot.silent and link and link.state is State.OPEN:
                yield slot, link

    def _connect_node(self, text: str, address: NodeAddress) -> NodeLink:
        node = NodeLink(
            self._context,
            address,
            self._connector,
            on_message=lambda message: self._on_message(text, message),
            refusals=self._refusals,
        )
        if self._announced:
            node.announce()
        return node

    def _on_message(self, address: str, message: FromNode) -> None:
        match message:
            case Roster():
                self._on_roster(address, message)
            case MetricsText(text):
                self._scrapes.received(address, text)

    def _on_roster(self, address: str, roster: Roster) -> None:
        now = self._loop.time()
        if self.closing or not self.rosters.update(address, roster, now):
            return
        self._refused.take(str(self._nodes[address].address), roster.epoch, roster.refused)
        for known in self._quarantine.update(address, roster, now):
            self._nodes[address].send(known)
        for slot in self.rosters.slots(now):
            link = self._links.get(slot.incarnation)
            if link is not None:
                link.update_slot(slot)
            elif slot.view.state == "ready" and slot.view.endpoint:
                self._connect_worker(slot)
        for link in list(self._links.values()):
            if self.rosters.is_gone(link.incarnation):
                link.lose("gone from the roster")
        self._notify_change()

    def _connect_worker(self, slot: Slot) -> None:
        node = self._nodes[slot.address]
        try:
            connect = self._connector.worker(node.resolved, slot.view)
        except AddressError as error:
            self._refusals.refuse(str(node.address), "nonsense", str(error))
            return
        self._links[slot.incarnation] = Link(
            self._context,
            slot,
            connect=connect,
            pong_wait_s=self._settings.pong_wait_s,
            on_change=self._notify_change,
            on_message=self._metrics.messages.inc,
            on_late_message=self._metrics.late.inc,
        )

    def _notify_change(self) -> None:
        self._links = {
            incarnation: link
            for incarnation, link in self._links.items()
            if link.state is not State.LOST
        }
        self._change.set()
        self._change = asyncio.Event()

    async def _ping_forever(self) -> None:
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            for node in self._nodes.values():
                node.reopen_if_silent(self._loop.time())
            for link in list(self._links.values()):
                link.ping(self._loop.time())
            self._refused.take(THIS_FRONT_END, "", self._refusals.counts)
