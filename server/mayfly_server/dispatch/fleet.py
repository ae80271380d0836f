"""Every node and worker that a front end knows of, and its connections to them.

Asking nodes for their metrics, for as long as a scrape may take.
"""

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
from mayfly_server.dispatch.connector import Dialler
from mayfly_server.dispatch.link import Context, Link, State
from mayfly_server.dispatch.node_link import NodeLink
from mayfly_server.dispatch.quarantine import QuarantineView, unrelated
from mayfly_server.dispatch.rosters import Incarnation, Outlook, Rosters, Slot, outlook
from mayfly_server.dispatch.routing import Candidate, choose
from mayfly_server.metrics import HERE, Metrics, RefusalCounts
from mayfly_server.settings import FrontSettings

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


_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that some slot serves or will. ``card`` is None until a worker has loaded it."""

    name: str
    card: ModelCard | None


class Fleet:
    """Listens to the nodes from :meth:`start` to :meth:`close`, both on one running event loop.
    ``leaving`` says that no request should come here any more, ``closing`` that none may stay."""

    def __init__(self, settings: FrontSettings, metrics: Metrics, dialler: Dialler) -> None:
        self.leaving = False
        self.closing = False
        self._settings = settings
        self._metrics = metrics
        self.rosters = Rosters(settings.roster_silence_s)
        self._links: dict[Incarnation, Link] = {}
        self._context: Context = zmq.Context()
        self._quarantine = QuarantineView()
        self._scrapes = Scrapes(metrics)
        self._dialler = dialler
        self._refusals = Refusals(_log.warning)
        self._refused = RefusalCounts(metrics.wire_refusals)
        self._nodes: dict[str, NodeLink] = {}
        self._announced = False
        self._change = asyncio.Event()
        self._ticking: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.use_nodes(self._settings.nodes)
        self._ticking = asyncio.create_task(self._tick(), name="ping the workers")

    def announce(self) -> None:
        """Tells every node, and those to come, that this front end serves."""
        self._announced = True
        for node in self._nodes.values():
            node.announce()

    def use_nodes(self, addresses: Iterable[str]) -> None:
        """Takes other nodes for those to listen to. What runs on the workers of one that is no
        longer among them goes on elsewhere.

        Raises:
            AddressError: nothing has changed: one of them cannot be dialled.
        """
        wanted = {text: node_address(text) for text in addresses}
        fresh = [text for text in wanted if text not in self._nodes]
        for text in fresh:
            self._dialler.control(wanted[text])
        for text in [text for text in self._nodes if text not in wanted]:
            self._nodes.pop(text).close()
            self.rosters.forget(text)
            self._quarantine.forget(text)
            for link in [link for link in self._links.values() if link.slot.address == text]:
                link.lose("its node is not used any more")
        for text in fresh:
            self._nodes[text] = self._connected(text, wanted[text])

    def shut(self) -> None:
        """Every request that has not ended yet ends with an error, at once."""
        self.leaving = self.closing = True
        for link in list(self._links.values()):
            link.close("this front end is leaving")
        self._changed()

    async def close(self) -> None:
        self.shut()
        if self._ticking is not None:
            self._ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticking
        for node in self._nodes.values():
            node.close()
        self._context.destroy(linger=0)

    async def node_metrics(self) -> list[bytes]:
        """What the nodes count, a page of each that answers soon."""
        asked = [address for address, node in self._nodes.items() if node.tell(AskMetrics())]
        return await self._scrapes.answers(asked)

    # What is known

    def nodes(self) -> Iterator[tuple[Roster, bool]]:
        """Every node's latest roster, and whether the node has been silent since."""
        return self.rosters.nodes(self._loop.time())

    def models(self) -> list[ServedModel]:
        """The served models in the order of their names, loaded or not."""
        cards: dict[str, ModelCard | None] = {}
        for slot in self.rosters.slots(self._loop.time()):
            cards[slot.view.model] = cards.get(slot.view.model) or slot.view.card
        return [ServedModel(name, cards[name]) for name in sorted(cards)]

    def machine_fails(self) -> bool:
        """Whether some node has lost workers of late for which no one request can be blamed."""
        return any(
            unrelated([(*loss.suspects, *loss.marked) for loss in roster.losses])
            for roster, _ in self.nodes()
        )

    @property
    def quarantine(self) -> list[Quarantined]:
        """All that is refused, by what the nodes say."""
        return self._quarantine.entries(self._loop.time())

    def quarantined(self, fingerprint: Callable[[], str]) -> str | None:
        """What workers died of when they ran a request, if it is to be refused. The fingerprint
        is asked for only where something is refused at all."""
        if self._quarantine.empty:
            return None
        return self._quarantine.kind(fingerprint(), self._loop.time())

    def condemn(self, fingerprint: str, kind: str) -> None:
        """Has a request refused everywhere for a while."""
        ttl_s = self._settings.quarantine_ttl_s
        if ttl_s > 0:
            self._quarantine.add(fingerprint, kind, self._loop.time())
            for node in self._nodes.values():
                node.tell(Quarantine(fingerprint, kind, ttl_s))

    def outlook(self, model: str | None = None) -> Outlook:
        """Of one model, or of all there are."""
        slots = self.rosters.slots(self._loop.time())
        connected = {slot.incarnation for slot, _ in self._usable()}
        return outlook([slot for slot in slots if model in (None, slot.view.model)], connected)

    def ready_workers(self) -> int:
        """How many workers can take a request now."""
        return sum(1 for _ in self._usable())

    def ready_models(self) -> list[str]:
        """The model of each of them."""
        return [slot.view.model for slot, _ in self._usable()]

    def standing_still(self) -> dict[str, float]:
        """The models all of whose workers have something to do and do not move, and since how many
        seconds. They may be lost."""
        links: dict[str, list[Link]] = {}
        for slot, link in self._usable():
            links.setdefault(slot.view.model, []).append(link)
        return {
            model: min(link.still_s for link in its)
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
        """The worker that a request should go to now, if there is one. One on trial gets a single
        request at a time; one that stands still gets none while others move.

        With a ``digest``, only workers that would continue another one's text exactly.
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
        """Is set when a roster comes or a link's state is another."""
        return self._change

    async def changed(self, timeout_s: float, since: asyncio.Event | None = None) -> None:
        """Returns at the next change, one ``since`` the caller last looked included, or when the
        time is over."""
        event = since or self._change
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await event.wait()

    @property
    def partly_known(self) -> bool:
        """Whether there are nodes that have not said yet what they serve."""
        return any(address not in self.rosters for address in self._nodes)

    async def heard(self, timeout_s: float) -> bool:
        """Waits for the first roster of a front end that has only just started."""
        deadline = self._loop.time() + timeout_s
        while not self.rosters and not self.closing and (left := deadline - self._loop.time()) > 0:
            await self.changed(left)
        return bool(self.rosters)

    # How it comes to be known

    def _usable(self) -> Iterator[tuple[Slot, Link]]:
        for slot in self.rosters.slots(self._loop.time()):
            link = self._links.get(slot.incarnation)
            if slot.view.state == "ready" and not slot.silent and link and link.state is State.OPEN:
                yield slot, link

    def _connected(self, text: str, address: NodeAddress) -> NodeLink:
        node = NodeLink(
            self._context,
            address,
            self._dialler,
            said=lambda message: self._said(text, message),
            refusals=self._refusals,
        )
        if self._announced:
            node.announce()
        return node

    def _said(self, address: str, message: FromNode) -> None:
        match message:
            case Roster():
                self._hear(address, message)
            case MetricsText(text):
                self._scrapes.answered(address, text)

    def _hear(self, address: str, roster: Roster) -> None:
        now = self._loop.time()
        if self.closing or not self.rosters.hear(address, roster, now):
            return
        self._refused.take(str(self._nodes[address].address), roster.epoch, roster.refused)
        for known in self._quarantine.hear(address, roster, now):
            self._nodes[address].tell(known)
        for slot in self.rosters.slots(now):
            link = self._links.get(slot.incarnation)
            if link is not None:
                link.follow(slot)
            elif slot.view.state == "ready" and slot.view.endpoint:
                self._dial(slot)
        for link in list(self._links.values()):
            if self.rosters.gone(link.incarnation):
                link.lose("gone from the roster")
        self._changed()

    def _dial(self, slot: Slot) -> None:
        node = self._nodes[slot.address]
        try:
            dial = self._dialler.worker(node.dialled, slot.view)
        except AddressError as error:
            self._refusals.refuse(str(node.address), "nonsense", str(error))
            return
        self._links[slot.incarnation] = Link(
            self._context,
            slot,
            dial=dial,
            pong_wait_s=self._settings.pong_wait_s,
            changed=self._changed,
            heard=self._metrics.messages.inc,
            late=self._metrics.late.inc,
        )

    def _changed(self) -> None:
        self._links = {
            incarnation: link
            for incarnation, link in self._links.items()
            if link.state is not State.LOST
        }
        self._change.set()
        self._change = asyncio.Event()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            for node in self._nodes.values():
                node.tick(self._loop.time())
            for link in list(self._links.values()):
                link.tick(self._loop.time())
            self._refused.take(HERE, "", self._refusals.counts)
