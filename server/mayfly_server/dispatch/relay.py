"""The owner of the promise that a request ends exactly once.

A relay finds a worker for one prompt, hands it over, and passes on what is generated. When the
worker is lost, gives the request back or stalls, the relay goes on with another one from the token
where the first one ended;
:class:`mayfly_server.dispatch.request_progress.Attempted` knows which that is.
What waits for a worker is held: without an answer until a worker has accepted the request, with
signs of life afterwards, and never without a bound.

What waits for a client that reads slowly: fewer, larger messages, and how large they are.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, replace

import structlog

from mayfly_protocol.faults import KINDS
from mayfly_protocol.requests import Generation
from mayfly_protocol.serving import Delta, Progress, TokenLogprob, Usage
from mayfly_server.dispatch.fleet import Fleet
from mayfly_server.dispatch.link import Link, Mailbox, Message
from mayfly_server.dispatch.quarantine import fingerprint
from mayfly_server.dispatch.request_progress import Again, Attempted, Ended
from mayfly_server.dispatch.rosters import Incarnation
from mayfly_server.errors import (
    DeadlineExceeded,
    Overloaded,
    RequestError,
    RequestFailed,
    ShuttingDown,
    Unavailable,
    WorkersLost,
)
from mayfly_server.metrics import Meter, Metrics
from mayfly_server.settings import FrontSettings

MOST_IDS = 256
"""In one joined delta, so that joining token by token stays cheap."""
_MESSAGE_BYTES = 100
_ID_BYTES = 8
_LOGPROB_BYTES = 80


def join(last: Message, new: Message) -> Message | None:
    """One delta that says what two that follow each other say, where there is one.

    Tool calls stay as they are, and so does text that was followed by a thought: a single delta
    has no room for that order.
    """
    if not (isinstance(last, Delta) and isinstance(new, Delta)):
        return None
    follows = (last.rid, last.attempt, last.choice) == (new.rid, new.attempt, new.choice)
    if not follows or last.index + len(last.ids) != new.index or last.finish is not None:
        return None
    if last.tool_calls or new.tool_calls or (last.text and new.reasoning):
        return None
    if len(last.ids) + len(new.ids) > MOST_IDS:
        return None
    return replace(
        new,
        index=last.index,
        ids=last.ids + new.ids,
        text=last.text + new.text,
        reasoning=last.reasoning + new.reasoning,
        logprobs=last.logprobs + new.logprobs,
    )


def weigh(message: Message) -> int:
    """About how many bytes a message holds."""
    if not isinstance(message, Delta):
        return _MESSAGE_BYTES
    text = len(message.text) + len(message.reasoning)
    calls = sum(len(call.arguments) + _MESSAGE_BYTES for call in message.tool_calls)
    logprobs = sum(map(_weigh_logprob, message.logprobs))
    return text + _ID_BYTES * len(message.ids) + calls + logprobs


def _weigh_logprob(logprob: TokenLogprob) -> int:
    return _LOGPROB_BYTES * (1 + len(logprob.top))


_log = structlog.get_logger(__name__)

_RETRY_FULL_S = 1.0
"""How soon a worker whose queue was full is asked again."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nothing new, but the request lives."""


Event = Delta | Progress | Waiting


@dataclass(slots=True)
class _Run:
    """An attempt that is under way."""

    link: Link
    mailbox: Mailbox[Message]
    heard_at: float


@dataclass(frozen=True, slots=True)
class _Inquest:
    """A worker died with the request, and its reaper has not said yet what of."""

    worker: Incarnation
    until: float


class Relay:
    """One prompt's way through the fleet. ``key`` is the conversation that it belongs to, and
    ``tenant`` who asks: a quarantine is that tenant's own. ``overfull`` is set when more waits to
    be read than may.

    :meth:`start`, then :meth:`events` to its end, and :meth:`close` in any case.
    """

    def __init__(
        self,
        fleet: Fleet,
        settings: FrontSettings,
        metrics: Metrics,
        *,
        rid: str,
        generation: Generation,
        key: bytes | None,
        tenant: str,
        overfull: asyncio.Event,
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._metrics = metrics
        self._meter = Meter(metrics.of(generation.model))
        self._generation = generation
        self._model = generation.model
        self._key = key
        self._tenant = tenant
        self._overfull = overfull
        self._loop = asyncio.get_running_loop()
        self._attempted = Attempted(rid, generation)
        self._run: _Run | None = None
        self._inquest: _Inquest | None = None
        self._digest: str | None = None
        self._tried = ""
        self._unfit: set[Incarnation] = set()
        self._parted: set[Incarnation] = set()
        """Those of them that may be alive and well behind a connection that was lost: they are
        asked again where there is no other."""
        self._full: dict[Incarnation, float] = {}
        now = self._loop.time()
        self._hold_until = now + settings.queue_wait_s
        self._deadline = now + (settings.request_timeout_s or math.inf)
        self._first: list[Event] = []
        self._usage: Usage | None = None
        self._failure: RequestError | None = None
        self._log = _log.bind(rid=rid, model=self._model)

    @property
    def digest(self) -> str:
        """The model that generates this; known after :meth:`start`."""
        return self._digest or ""

    @property
    def prompt_tokens(self) -> int:
        """Known after :meth:`start`."""
        accepted = self._attempted.accepted
        return accepted.prompt_tokens if accepted else 0

    @property
    def usage(self) -> Usage:
        """Known once :meth:`events` has ended."""
        assert self._usage is not None, "usage is known at the end"
        return self._usage

    async def start(self) -> None:
        """Returns when a worker has accepted the request.

        Raises:
            InvalidRequest: no worker could ever run it.
            Overloaded, Unavailable: none can now.
            DeadlineExceeded: it has taken longer than any request may.
            RequestFailed: it met a fault of its own.
        """
        self._meter.arrived()
        while self._attempted.accepted is None:
            self._first += await self._next()

    async def events(self) -> AsyncIterator[list[Event]]:
        """What is new to the client, until every choice has ended. Raises as :meth:`start`."""
        events, self._first = self._first, []
        while True:
            if events:
                yield events
            if self._usage is not None:
                return
            events = await self._next()

    def close(self) -> None:
        """Tells the worker, if one still runs the request, that nobody waits for it."""
        self._abandon()
        self._meter.ended(self._usage)

    def _abandon(self) -> None:
        if self._run is not None:
            self._run.link.abandon(self._attempted.rid, self._attempted.attempt)
            self._run = None

    async def _next(self) -> list[Event]:
        if self._failure is not None:
            raise self._failure
        if self._fleet.closing:
            raise ShuttingDown("The server is shutting down.", retry_after_s=_RETRY_FULL_S)
        patience_s = min(self._settings.keep_alive_s, self._deadline - self._loop.time())
        if patience_s <= 0:
            self._abandon()
            raise DeadlineExceeded(
                f"The answer took longer than {self._settings.request_timeout_s:g} seconds."
            )
        if self._run is None:
            return await self._place(patience_s)
        messages = await self._run.mailbox.take(patience_s)
        if not messages:
            return self._quiet(self._run)
        self._run.heard_at = self._loop.time()
        return self._receive(self._run, messages)

    # A worker runs it

    def _receive(self, run: _Run, messages: list[Message]) -> list[Event]:
        """A failure waits until the client has got what came before it."""
        events: list[Event] = []
        try:
            for message in messages:
                match self._attempted.receive(message):
                    case None:
                        self._pin(run.link)
                    case Again() | Ended() as over:
                        self._leave(run, over)
                        break
                    case Delta() as delta:
                        self._meter.generated(delta)
                        events.append(delta)
                    case Progress() as progress:
                        self._meter.progressed()
                        events.append(progress)
        except RequestError as failure:
            self._failure = failure
        return events

    def _quiet(self, run: _Run) -> list[Event]:
        """Nothing came for a while. A queued request may wait as long as the worker's engine moves
        at all."""
        since = run.heard_at
        bound = self._settings.accept_wait_s
        if self._attempted.accepted is not None:
            bound = self._settings.stall_s
            if not self._attempted.started:
                since = max(since, run.link.progressed_at)
        if self._loop.time() - since > bound:
            self._leave(run, self._attempted.stalled())
        return [Waiting()]

    def _pin(self, link: Link) -> None:
        """From its acceptance on, the request's text is that of one model."""
        self._digest = self._digest or _digest(link) or None
        self._meter.accepted(self.prompt_tokens)

    def _leave(self, run: _Run, over: Again | Ended) -> None:
        """Raises WorkersLost where that was the last worker that the request might outlive."""
        self._abandon()
        if isinstance(over, Ended):
            self._usage = over.usage
            return
        if self._attempted.accepted is None:
            self._meter.retried(over.cause)
        if over.full:
            self._full[run.link.incarnation] = over.retry_after_s or _RETRY_FULL_S
            return
        if not over.stays:
            self._unfit.add(run.link.incarnation)
        if over.cause == "lost":
            self._parted.add(run.link.incarnation)
        if over.struck:
            self._died(over.cause)
        if over.struck is None:
            until = self._loop.time() + self._settings.verdict_wait_s
            self._inquest = _Inquest(run.link.incarnation, until)
        if self._attempted.losses >= self._settings.max_attempts:
            raise WorkersLost(
                f"The request outlived {self._attempted.losses} workers.",
                retry_after_s=_RETRY_FULL_S,
            )
        if self._attempted.accepted is not None:
            self._hold_until = self._loop.time() + self._settings.failover_wait_s
            self._meter.continued(over.cause)
        self._log.info("moving on", cause=over.cause, attempt=self._attempted.attempt)

    # Workers died of it

    def _died(self, kind: str) -> None:
        """Raises RequestFailed where that was one time too often."""
        self._attempted.died(kind)
        record = self._attempted.record
        self._log.info("was there when a worker died", kind=kind, deaths=record.deaths)
        if record.condemned and not self._fleet.machine_fails():
            self._fleet.condemn(self._fingerprint(), kind)
            self._metrics.quarantined(self._model, kind)
            raise _failure(kind)

    def _refuse_condemned(self) -> None:
        kind = self._fleet.quarantined(self._fingerprint)
        if kind is not None:
            self._metrics.refused(self._model, kind)
            raise _failure(kind)

    def _fingerprint(self) -> str:
        return fingerprint(self._generation, self._tried, self._tenant)

    async def _await_verdict(self, inquest: _Inquest) -> None:
        """Who may have killed a worker is known a moment after it is gone. What goes on before
        that goes on without a flag."""
        now = self._loop.time()
        loss = self._fleet.rosters.loss(inquest.worker)
        left = inquest.until - now
        if loss is None and left > 0 and self._fleet.rosters.watched(inquest.worker, now):
            await self._fleet.changed(left)
            return
        self._inquest = None
        if loss is not None and self._attempted.rid in (*loss.suspects, *loss.marked):
            self._died(loss.kind)

    # No worker runs it

    async def _place(self, patience_s: float) -> list[Event]:
        if self._inquest is not None:
            await self._await_verdict(self._inquest)
            return [Waiting()]
        link = self._choose(self._unfit) or self._choose(self._unfit - self._parted)
        if link is not None:
            self._submit(link)
            return []
        held = self._attempted.accepted is not None
        left = self._hold_until - self._loop.time()
        if left <= 0 or not self._worth_holding(held, left):
            raise self._no_worker()
        if self._full:
            await asyncio.sleep(min(left, patience_s, _RETRY_FULL_S))
            self._full.clear()
        else:
            await self._fleet.changed(min(left, patience_s))
        return [Waiting()]

    def _choose(self, unfit: set[Incarnation]) -> Link | None:
        refused = unfit | self._full.keys()
        return self._fleet.choose(self._model, self._key, digest=self._digest, refused=refused)

    def _submit(self, link: Link) -> None:
        self._tried = _digest(link)
        self._refuse_condemned()
        mailbox: Mailbox[Message] = Mailbox(
            join=join,
            weigh=weigh,
            limit=self._settings.max_unread_bytes,
            overfull=self._overfull.set,
        )
        link.submit(self._attempted.submit(), mailbox)
        self._meter.submitted()
        self._run = _Run(link, mailbox, self._loop.time())
        name = link.incarnation
        self._log = self._log.bind(node=name.node, slot=name.slot, incarnation=name.number)
        if self._settings.logs.prompts and self._attempted.attempt == 1:
            self._log.info("asked", prompt=asdict(self._generation.prompt))

    def _worth_holding(self, held: bool, left: float) -> bool:
        outlook = self._fleet.outlook(self._model)
        if outlook.failed:
            return False
        return held or (outlook.coming and outlook.pause_s <= left and not self._full)

    def _no_worker(self) -> RequestError:
        if self._full and self._attempted.accepted is None:
            return Overloaded(
                f"Every worker of {self._model} has a full queue.",
                retry_after_s=min(self._full.values()),
            )
        outlook = self._fleet.outlook(self._model)
        return Unavailable(
            f"No worker of {self._model} is ready: {outlook.reason}.",
            code="model_failed" if outlook.failed else None,
            retry_after_s=outlook.ready_in_s,
        )


def _digest(link: Link) -> str:
    card = link.slot.view.card
    return card.digest if card else ""


def _failure(kind: str) -> RequestFailed:
    """What the client is told of a request that workers die of, the first time and every time
    until it is taken again."""
    if kind in KINDS and KINDS[kind].scope in ("request", "batch"):
        text = f"The model failed on this request again and again ({kind})."
    else:
        text = f"Workers die of this request ({kind}); it is not run again for a while."
    return RequestFailed(text, code=kind)
