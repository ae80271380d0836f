"""The fleet: all nodes and workers that a front end knows, and the front end's connections to
them."""

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
from mayfly_server.dispatch.quarantine import QuarantineView, served_others, unrelated
from mayfly_server.dispatch.rosters import Incarnation, Rosters, Slot
from mayfly_server.dispatch.routing import Candidate, choose
from mayfly_server.metrics import THIS_FRONT_END, Metrics, RefusalCounts
from mayfly_server.settings import FrontSettings

SCRAPE_WAIT_S = 2.0
"""Seconds that a node may take to send its metrics. Prometheus waits 10 s by default for a page."""

_log = structlog.get_logger(__name__)


class PendingScrapes:
    """Scrapes of the front end that wait for nodes to send their metrics. If several scrapes wait
    for a node, the node's next metrics page answers all of them."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._waiting: defaultdict[str, list[asyncio.Future[bytes]]] = defaultdict(list)

    def received(self, address: str, text: str) -> None:
        """Gives a metrics page, received from the node at ``address``, to the scrapes that wait for
        it."""
        for waiting in self._waiting.pop(address, []):
            if not waiting.done():
                waiting.set_result(text.encode())

    async def pages(self, asked: Sequence[str]) -> list[bytes]:
        """Returns the metrics pages of the nodes with the addresses ``asked``, which were asked
        just now. A page that does not come within :data:`SCRAPE_WAIT_S` seconds is left out."""
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
    """A model that workers serve or are about to serve. ``card`` holds the model's properties
    (digest, chat template, capacity); it is None until the first worker has loaded the model."""

    name: str
    card: ModelCard | None


class Fleet:
    """All nodes and workers that a front end knows, and the front end's connections to them.

    It listens to the nodes from :meth:`start` to :meth:`close`, on one event loop.

    Attributes:
        leaving: the front end shuts down, and load balancers should send no new requests to it.
        closing: the requests that still run in this front end are being ended.
        rosters: the latest roster of each node, the list of the node's workers and their states.
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
        self._served: dict[Incarnation, set[str]] = {}
        """The requests of this front end for which each worker has generated tokens; kept while a
        roster lists the worker or its loss."""
        self._scrapes = PendingScrapes(metrics)
        self._connector = connector
        self._refusals = Refusals(_log.warning)
        self._refused = RefusalCounts(metrics.wire_refusals)
        self._nodes: dict[str, NodeLink] = {}
        self._announced = False
        self._change = asyncio.Event()
        self._pinging: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connects to the nodes that the settings name, and begins to ping their workers."""
        self._loop = asyncio.get_running_loop()
        self.use_nodes(self._settings.nodes)
        self._pinging = asyncio.create_task(self._ping_forever(), name="ping the workers")

    def announce(self) -> None:
        """Tells every node, and each node that is added later, that this front end serves
        clients."""
        self._announced = True
        for node in self._nodes.values():
            node.announce()

    def use_nodes(self, addresses: Iterable[str]) -> None:
        """Replaces the list of nodes. Requests that run on a node which is no longer listed
        continue on other nodes.

        Raises:
            AddressError: one of the addresses cannot be used; the list of nodes stays as it was.
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
        """Ends all running requests at once; their clients get an error."""
        self.leaving = self.closing = True
        for link in list(self._links.values()):
            link.close("front end shuts down")
        self._notify_change()

    async def close(self) -> None:
        """Ends all running requests with an error, and closes all connections to nodes and
        workers."""
        self.end_requests()
        if self._pinging is not None:
            self._pinging.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._pinging
        for node in self._nodes.values():
            node.close()
        self._context.destroy(linger=0)

    async def node_metrics(self) -> list[bytes]:
        """Asks all nodes for their metrics. Returns the page, in Prometheus's text format, of each
        node that answers within :data:`SCRAPE_WAIT_S` seconds."""
        asked = [address for address, node in self._nodes.items() if node.send(AskMetrics())]
        return await self._scrapes.pages(asked)

    # State of the fleet

    def nodes(self) -> Iterator[tuple[Roster, bool]]:
        """Yields each node's latest roster (the list of its workers), and True if the node is
        silent: has sent no roster for ``roster_silence_s`` seconds."""
        return self.rosters.nodes(self._loop.time())

    def models(self) -> list[ServedModel]:
        """All models that the nodes serve or are about to serve, in the order of their names."""
        cards: dict[str, ModelCard | None] = {}
        for slot in self.rosters.slots(self._loop.time()):
            cards[slot.view.model] = cards.get(slot.view.model) or slot.view.card
        return [ServedModel(name, cards[name]) for name in sorted(cards)]

    def note_served(self, worker: Incarnation, rid: str) -> None:
        """Notes that a worker has generated tokens for a request."""
        self._served.setdefault(worker, set()).add(rid)

    def machine_is_failing(self) -> bool:
        """True if a node lost several workers within the last minute that had no request in common,
        and no worker that it started since the first of them has generated anything for another
        request, so that the machine is to blame and no request is."""
        return any(
            unrelated([(*loss.suspects, *loss.marked) for loss in roster.losses])
            and not self._fresh_worker_served(roster)
            for roster, _ in self.nodes()
        )

    def _fresh_worker_served(self, roster: Roster) -> bool:
        losses = {loss.incarnation: loss for loss in roster.losses}
        return any(
            served_others(rids, losses.get(worker.number))
            for worker, rids in self._served.items()
            if (worker.node, worker.epoch) == (roster.node, roster.epoch)
            and worker.number > min(losses)
        )

    def quarantined(self) -> list[Quarantined]:
        """All requests that the nodes list as quarantined: refused because workers died of them."""
        return self._quarantine.entries(self._loop.time())

    def quarantine_kind(self, fingerprint: Callable[[], str]) -> str | None:
        """The kind of fault for which a request is in quarantine (refused); None if it is not.
        ``fingerprint`` computes the request's hash, and is called only if any request is in
        quarantine."""
        if self._quarantine.empty:
            return None
        return self._quarantine.kind(fingerprint(), self._loop.time())

    def quarantine(self, fingerprint: str, kind: str) -> None:
        """Puts the request with this hash into quarantine, because workers died of it by this kind
        of fault: all front ends refuse the request for ``quarantine_ttl_s`` seconds."""
        ttl_s = self._settings.quarantine_ttl_s
        if ttl_s > 0:
            self._quarantine.add(fingerprint, kind, self._loop.time())
            for node in self._nodes.values():
                node.send(Quarantine(fingerprint, kind, ttl_s))

    def availability(self, model: str | None = None) -> Availability:
        """The prospect that a worker of this model, or of any model if none is given, will be
        ready."""
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
        """The models of which every ready worker is stalled (busy, but without progress for more
        than :data:`mayfly_server.dispatch.link.STALLED_S`), with the seconds since the last
        progress of any of the model's workers."""
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
        """Chooses the worker for a request, and returns the connection to this worker; None if no
        worker can take the request now.

        A worker on trial, because its predecessors failed, gets requests only if there is no other.
        A stalled worker, which makes no progress, gets requests only if all are stalled.

        Args:
            key: the conversation that the request belongs to: its requests go to the same worker.
            digest: if given, only workers whose model has this digest are chosen, since only the
                same model continues another worker's text exactly.
            refused: workers that are not chosen.
        """
        candidates = [
            Candidate(slot.name, link.load, link, slot.capacity)
            for slot, link in self._usable()
            if slot.view.model == model
            and slot.incarnation not in refused
            and (digest is None or (slot.view.card and slot.view.card.digest == digest))
        ]
        moving = [candidate for candidate in candidates if not candidate.worker.stalled]
        candidates = moving or candidates
        steady = [each for each in candidates if not each.worker.slot.view.trial]
        best = choose(steady or candidates, key)
        return best.worker if best else None

    @property
    def next_change(self) -> asyncio.Event:
        """An event that is set when the next roster (a node's list of its workers) comes, or when
        the state of the connection to a worker changes."""
        return self._change

    async def wait_for_change(self, timeout_s: float, since: asyncio.Event | None = None) -> None:
        """Waits until a roster (a node's list of its workers) comes or a connection to a worker
        opens or ends, at most ``timeout_s`` seconds. With ``since``, an earlier value of
        :attr:`next_change`, the wait ends at once if there has been a change since that value was
        read."""
        event = since or self._change
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await event.wait()

    @property
    def partly_known(self) -> bool:
        """True while at least one node has not sent the list of its workers yet, so that the node's
        models are not known."""
        return any(address not in self.rosters for address in self._nodes)

    async def wait_for_roster(self, timeout_s: float) -> bool:
        """Waits at most ``timeout_s`` seconds until any node has sent the list of its workers.
        Returns False if none has."""
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
        self._served = {
            worker: rids for worker, rids in self._served.items() if self.rosters.lists(worker)
        }
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
