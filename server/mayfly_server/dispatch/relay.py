"""Relays one prompt to workers, and the generated text to the client, until the prompt has ended.

::

    find a worker --> submit --> accepted --> deltas --> every choice has ended
         ^                |          |           |
         |  rejected, lost, stalled, handed over |
         +--------------- retry <----------------+

If the worker is lost, gives the request back unfinished (handover) or stalls, the relay submits the
request to another worker, which continues after the last token that the client got:
:class:`mayfly_server.dispatch.request_progress.RequestProgress` keeps these tokens. A request that
waits for a worker gets no HTTP answer until a worker has accepted it, and comments in its stream
afterwards. Every wait has a time limit.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass

import structlog

from mayfly_protocol.faults import KINDS
from mayfly_protocol.requests import Generation
from mayfly_protocol.serving import Delta, Progress, Usage
from mayfly_server.dispatch.fleet import Fleet
from mayfly_server.dispatch.link import Link
from mayfly_server.dispatch.mailbox import Mailbox, Message, merge_deltas, size_of
from mayfly_server.dispatch.quarantine import fingerprint
from mayfly_server.dispatch.request_progress import Ended, RequestProgress, Retry
from mayfly_server.dispatch.rosters import Incarnation
from mayfly_server.errors import (
    DeadlineExceeded,
    Overloaded,
    RequestError,
    RequestFailed,
    ShuttingDown,
    WorkersLost,
)
from mayfly_server.metrics import Metrics, PromptMetrics
from mayfly_server.settings import FrontSettings

_RETRY_FULL_S = 1.0
"""Seconds after which a request is submitted again to a worker whose queue was full, and
Retry-After, in seconds, where nothing better is known."""

BYSTANDER = 10
"""A request may lose this number of times ``max_attempts`` workers in a row, without a new token,
that failed in forward passes without it."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Waiting:
    """An event that only says that the request still waits for a worker or still runs."""


Event = Delta | Progress | Waiting


@dataclass(slots=True)
class _Attempt:
    """The present try of a request on one worker. ``heard_at`` is the time of that worker's last
    message about the request."""

    link: Link
    mailbox: Mailbox[Message]
    heard_at: float


@dataclass(frozen=True, slots=True)
class PendingVerdict:
    """A wait, until the time ``until``, for the node of a dead worker to tell which requests may
    have caused the death."""

    worker: Incarnation
    until: float


class Relay:
    """Runs one prompt on the workers of the fleet, on one after the other if workers are lost. Call
    :meth:`start`, then iterate over :meth:`events` to the end, and call :meth:`close` in any case.

    Args:
        key: the conversation that the prompt belongs to; its requests go to the same worker.
        tenant: the name of the client's API key; if workers die of the prompt, it is refused for
            this key alone.
        overfull: set when the client has more unread bytes than ``max_unread_bytes``.
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
        self._prompt_metrics = PromptMetrics(metrics.of(generation.model))
        self._generation = generation
        self._model = generation.model
        self._key = key
        self._tenant = tenant
        self._overfull = overfull
        self._loop = asyncio.get_running_loop()
        self._progress = RequestProgress(rid, generation)
        self._attempt: _Attempt | None = None
        self._pending_verdict: PendingVerdict | None = None
        self._accepted_digest: str | None = None
        self._last_digest = ""
        self._excluded: set[Incarnation] = set()
        """Workers that this request is not submitted to again."""
        self._disconnected: set[Incarnation] = set()
        """Excluded workers that may be healthy, since only the connection was lost; tried again if
        no other worker can take the request."""
        self._full: dict[Incarnation, float] = {}
        """Workers whose queue was full, each with the seconds until it wants to be asked again."""
        now = self._loop.time()
        self._hold_until = now + settings.queue_wait_s
        self._deadline = now + (settings.request_timeout_s or math.inf)
        self._first: list[Event] = []
        self._usage: Usage | None = None
        self._failure: RequestError | None = None
        self._log = _log.bind(rid=rid, model=self._model)

    @property
    def digest(self) -> str:
        """The digest (hash) of the model that generates the text; known after :meth:`start`."""
        return self._accepted_digest or ""

    @property
    def prompt_tokens(self) -> int:
        """The prompt's length in tokens; known after :meth:`start`."""
        accepted = self._progress.accepted
        return accepted.prompt_tokens if accepted else 0

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt's token ids, if the request asks for them; known after :meth:`start`."""
        accepted = self._progress.accepted
        return accepted.prompt_ids if accepted else ()

    @property
    def usage(self) -> Usage:
        """The numbers of prompt and generated tokens; known once :meth:`events` has ended."""
        assert self._usage is not None, "usage is known at the end"
        return self._usage

    async def start(self) -> None:
        """Waits until a worker has accepted the request.

        Raises:
            InvalidRequest: no worker can ever run the request.
            Overloaded, Unavailable: no worker can run the request now.
            DeadlineExceeded: the request has taken longer than ``request_timeout_s``.
            RequestFailed: the request itself makes the model or its workers fail.
        """
        self._prompt_metrics.arrived()
        while self._progress.accepted is None:
            self._first += await self._step()

    async def events(self) -> AsyncIterator[list[Event]]:
        """Yields new events until every choice has ended. Raises a RequestError, such as
        DeadlineExceeded or WorkersLost, if the request cannot be completed."""
        events, self._first = self._first, []
        while True:
            if events:
                yield events
            if self._usage is not None:
                return
            events = await self._step()

    def close(self) -> None:
        """Ends the request. If a worker still runs the request, the worker is told to stop."""
        self._cancel_attempt()
        self._prompt_metrics.ended(self._usage)

    async def _step(self) -> list[Event]:
        """Takes the one step that the request needs next: receives from its worker, waits, or
        chooses a worker and submits to it. Returns new events for the client, maybe none. Raises a
        RequestError if the request cannot be completed."""
        patience_s = self._check_limits()
        if self._attempt is not None:
            return await self._receive(self._attempt, patience_s)
        if self._pending_verdict is not None:
            return await self._await_verdict(self._pending_verdict)
        link = self._choose_worker()
        if link is not None:
            return self._submit(link)
        return await self._wait_for_worker(patience_s)

    def _check_limits(self) -> float:
        """Returns the number of seconds that the next step may wait. Raises ShuttingDown if the
        front end ends its requests, DeadlineExceeded if the request has taken longer than
        ``request_timeout_s``, or an error of a worker that was kept until the client had the text
        before it."""
        if self._failure is not None:
            raise self._failure
        if self._fleet.closing:
            raise ShuttingDown("The server is shutting down.", retry_after_s=_RETRY_FULL_S)
        patience_s = min(self._settings.keep_alive_s, self._deadline - self._loop.time())
        if patience_s <= 0:
            self._cancel_attempt()
            raise DeadlineExceeded(
                f"The answer took longer than {self._settings.request_timeout_s:g} seconds."
            )
        return patience_s

    # A worker has the request

    async def _receive(self, attempt: _Attempt, patience_s: float) -> list[Event]:
        messages = await attempt.mailbox.take(patience_s)
        if not messages:
            self._end_if_stalled(attempt)
            return [Waiting()]
        attempt.heard_at = self._loop.time()
        return self._handle(attempt, messages)

    def _handle(self, attempt: _Attempt, messages: list[Message]) -> list[Event]:
        """Turns a worker's messages into events for the client. If a message is an error, the error
        is kept, and the next step raises it, when the client has got the events before it."""
        events: list[Event] = []
        try:
            for message in messages:
                match self._progress.receive(message):
                    case None:
                        self._note_accepted(attempt.link)
                    case Ended() | Retry() as over:
                        self._end_attempt(attempt, over)
                        break
                    case Delta() as delta:
                        self._fleet.note_served(attempt.link.incarnation, self._progress.rid)
                        self._prompt_metrics.generated(delta)
                        events.append(delta)
                    case Progress() as progress:
                        self._prompt_metrics.progressed()
                        events.append(progress)
        except RequestError as failure:
            self._failure = failure
        return events

    def _end_if_stalled(self, attempt: _Attempt) -> None:
        """Ends the request's try on a worker that has sent nothing about the request for too long:
        ``accept_wait_s`` seconds until it accepts the request, ``stall_s`` seconds afterwards.
        While the request is in the worker's queue, progress of the worker with other requests
        counts, too."""
        since = attempt.heard_at
        bound = self._settings.accept_wait_s
        if self._progress.accepted is not None:
            bound = self._settings.stall_s
            if not self._progress.started:
                since = max(since, attempt.link.progressed_at)
        if self._loop.time() - since > bound:
            self._end_attempt(attempt, self._progress.stalled())

    def _end_attempt(self, attempt: _Attempt, over: Ended | Retry) -> None:
        self._cancel_attempt()
        if isinstance(over, Ended):
            self._usage = over.usage
        else:
            self._retry(attempt, over)

    def _note_accepted(self, link: Link) -> None:
        """Keeps the model's digest: only workers with the same digest may continue the request."""
        self._accepted_digest = self._accepted_digest or _digest(link) or None
        self._prompt_metrics.accepted(self.prompt_tokens)

    def _cancel_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.link.cancel(self._progress.rid, self._progress.attempt)
            self._attempt = None

    # The request continues after an attempt has ended

    def _retry(self, attempt: _Attempt, retry: Retry) -> None:
        """Notes why a try on a worker ended without ending the request, so that the next step
        chooses another worker.

        Raises:
            WorkersLost: too many workers were lost or failed since the request's last token.
            RequestFailed: the request is to blame for the deaths of workers.
        """
        worker = attempt.link.incarnation
        if self._progress.accepted is None:
            self._prompt_metrics.retried(retry.cause)
        if retry.worker_full:
            self._full[worker] = retry.retry_after_s or _RETRY_FULL_S
            return
        if not retry.worker_stays:
            self._excluded.add(worker)
        if retry.cause == "lost":
            self._disconnected.add(worker)
        if retry.in_failed_pass:
            self._count_death(retry.cause)
        if retry.in_failed_pass is None:
            until = self._loop.time() + self._settings.verdict_wait_s
            self._pending_verdict = PendingVerdict(worker, until)
        else:
            self._check_losses()
        if self._progress.accepted is not None:
            self._hold_until = self._loop.time() + self._settings.failover_wait_s
            self._prompt_metrics.continued(retry.cause)
        self._log.info(
            "retrying request on another worker", cause=retry.cause, attempt=self._progress.attempt
        )

    def _check_losses(self) -> None:
        """Raises WorkersLost if, since the request's last new token, ``max_attempts`` workers were
        lost or failed with it, or :data:`BYSTANDER` times as many in passes without it."""
        progress, most = self._progress, self._settings.max_attempts
        if progress.losses >= most or progress.moves >= BYSTANDER * most:
            raise _workers_lost(progress.moves)

    async def _await_verdict(self, pending: PendingVerdict) -> list[Event]:
        """Waits for the node of a dead worker to tell which requests may have caused the death, and
        counts the death if this request is among them: the request may have to continue as a
        suspect, of which a worker runs only one at a time."""
        now = self._loop.time()
        loss = self._fleet.rosters.loss(pending.worker)
        left = pending.until - now
        if loss is None and left > 0 and self._fleet.rosters.is_watched(pending.worker, now):
            await self._fleet.wait_for_change(left)
        else:
            self._pending_verdict = None
            if loss is not None and self._progress.rid in (*loss.suspects, *loss.marked):
                self._count_death(loss.kind, loss.first_cause)
            elif loss is not None:
                self._progress.not_named()
            self._check_losses()
        return [Waiting()]

    def _count_death(self, kind: str, cause: str = "") -> None:
        """Counts the death of a worker that had this request in its last forward pass.

        Raises:
            RequestFailed: the request is to blame, and is refused from now on (quarantine).
            WorkersLost: the request would be to blame, but the machine may be failing.
        """
        self._progress.worker_died(kind)
        record = self._progress.record
        self._log.info("worker died while running this request", kind=kind, deaths=record.deaths)
        if record.culprit and self._fleet.machine_is_failing():
            raise _workers_lost(self._progress.moves)
        if record.culprit:
            self._fleet.quarantine(self._fingerprint(), kind)
            self._metrics.quarantined(self._model, kind)
            raise _failure(kind, cause)

    # No worker has the request

    def _choose_worker(self) -> Link | None:
        return self._choose(self._excluded) or self._choose(self._excluded - self._disconnected)

    def _choose(self, excluded: set[Incarnation]) -> Link | None:
        refused = excluded | self._full.keys()
        digest = self._accepted_digest
        return self._fleet.choose(self._model, self._key, digest=digest, refused=refused)

    def _submit(self, link: Link) -> list[Event]:
        """Submits the request to a worker. Raises RequestFailed if the request is in quarantine
        (refused, because workers died of it)."""
        self._last_digest = _digest(link)
        kind = self._fleet.quarantine_kind(self._fingerprint)
        if kind is not None:
            self._metrics.refused(self._model, kind)
            raise _failure(kind)
        mailbox: Mailbox[Message] = Mailbox(
            merge=merge_deltas,
            size=size_of,
            limit=self._settings.max_unread_bytes,
            on_overfull=self._overfull.set,
        )
        link.submit(self._progress.submit(), mailbox)
        self._prompt_metrics.submitted()
        self._attempt = _Attempt(link, mailbox, self._loop.time())
        name = link.incarnation
        self._log = self._log.bind(node=name.node, slot=name.slot, incarnation=name.number)
        if self._settings.logs.prompts and self._progress.attempt == 1:
            self._log.info("request submitted to a worker", prompt=asdict(self._generation.prompt))
        return []

    def _fingerprint(self) -> str:
        return fingerprint(self._generation, self._last_digest, self._tenant)

    async def _wait_for_worker(self, patience_s: float) -> list[Event]:
        """Waits at most ``patience_s`` seconds until a worker may take the request. Raises
        Overloaded or Unavailable if none can be expected to take it before the request has waited
        too long."""
        left = self._hold_until - self._loop.time()
        if left <= 0 or not self._worth_waiting(left):
            raise self._no_worker()
        if self._full:
            await asyncio.sleep(min(left, patience_s, _RETRY_FULL_S))
            self._full.clear()
        else:
            await self._fleet.wait_for_change(min(left, patience_s))
        return [Waiting()]

    def _worth_waiting(self, left: float) -> bool:
        found = self._fleet.availability(self._model)
        accepted = self._progress.accepted is not None
        soon = found.coming and found.pause_s <= left and not self._full
        return not found.failed and (accepted or soon)

    def _no_worker(self) -> RequestError:
        if self._full and self._progress.accepted is None:
            return Overloaded(
                f"Every worker of {self._model} has a full queue.",
                retry_after_s=min(self._full.values()),
            )
        return self._fleet.availability(self._model).error(self._model)


def _digest(link: Link) -> str:
    card = link.slot.view.card
    return card.digest if card else ""


def _workers_lost(number: int) -> WorkersLost:
    return WorkersLost(f"The request outlived {number} workers.", retry_after_s=_RETRY_FULL_S)


def _failure(kind: str, cause: str = "") -> RequestFailed:
    """The error for a request that is to blame for faults of workers of this kind, and for each
    equal request that is refused while it is in quarantine."""
    if kind in KINDS and KINDS[kind].scope in ("request", "batch"):
        text = f"The model failed on this request again and again ({kind})."
    else:
        text = f"Workers die of this request ({kind}); it is not run again for a while."
    return RequestFailed(text, code=kind, cause=cause)
