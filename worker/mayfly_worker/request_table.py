"""Table of all requests of this worker, with their front ends, their states and their messages.

The table lives on the main thread. It takes messages of front ends, outcomes of preparation
(tokenizing and the like) and events of the engine; it sends commands to the engine and messages to
front ends.

*Suspects* are requests that earlier workers may have crashed on. The engine runs them in forward
passes of their own, between those of the other requests, and only one suspect at a time, in order
of arrival: if this worker crashes, too, the culprit is known. The next suspect starts when the
running one has ended, or has generated so many tokens that it has proven harmless.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable

from mayfly_protocol.serving import (
    Accepted,
    Cancel,
    Delta,
    Detokenize,
    Detokenized,
    Failed,
    Finish,
    Handover,
    Inquiry,
    Ping,
    Pong,
    Rejected,
    Submit,
    Tokenize,
    Tokenized,
    Tokens,
    ToWorker,
)
from mayfly_worker.engine.scheduler import Engine
from mayfly_worker.engine.sequence import (
    CancelCommand,
    Event,
    Prefilled,
    PromptScored,
    SampledToken,
    SequenceFailed,
    Start,
    Started,
    StepResult,
    Stop,
)
from mayfly_worker.prepare import InquiryDone, PreparationDone, PreparationPool, PreparedRequest
from mayfly_worker.request_errors import InvalidInput
from mayfly_worker.request_state import RequestState, TokenText
from mayfly_worker.wire import Wire

MAX_INQUIRIES = 256
"""Most Tokenize and Detokenize messages that may wait for their answers; more are rejected."""


class RequestTable:
    """Table of a worker's requests: admits the requests of front ends (HTTP server processes),
    follows them through the engine, and ends them. At most ``max_waiting`` requests may wait beside
    those that run. ``token_text`` returns a token id's text and bytes."""

    def __init__(
        self,
        wire: Wire,
        preparation: PreparationPool,
        engine: Engine,
        *,
        token_text: TokenText,
        max_waiting: int,
    ) -> None:
        self._wire = wire
        self._preparation = preparation
        self._engine = engine
        self._token_text = token_text
        self._max_waiting = max_waiting
        self._requests: dict[str, RequestState] = {}
        self._by_sequence: dict[int, RequestState] = {}
        self._suspect: RequestState | None = None
        """The suspect (a request that an earlier worker may have crashed on) that runs now, until
        it has ended or proven harmless; None if no suspect runs."""
        self._waiting_suspects: deque[tuple[RequestState, list[Start]]] = deque()
        self._inquiries = 0
        self._leaving = False
        self._finish_times: list[float] = []
        self.inferences = 0
        """Number of choices that have ended since the worker started."""

    # Numbers

    @property
    def running(self) -> int:
        """Number of requests that the engine has started and that have not ended."""
        return sum(1 for request in self._requests.values() if request.started)

    @property
    def waiting(self) -> int:
        """Number of requests that the engine has not started, including requests still in
        preparation (template, tokens, grammar)."""
        return len(self._requests) - self.running

    @property
    def preparing(self) -> int:
        """Number of requests still in preparation (template, tokens, grammar), which the engine
        does not know yet."""
        return sum(1 for request in self._requests.values() if request.prepared is None)

    @property
    def waiting_tokens(self) -> int:
        """Sum of the prompt tokens of prepared requests that the engine has not started."""
        waiting = (request.prepared for request in self._requests.values() if not request.started)
        return sum(p.prompt_tokens for p in waiting if p)

    def counters(self) -> dict[str, int]:
        """Returns the counters of this table's requests, by the names of their fields in
        ``WorkerCounters`` (all counters of a worker)."""
        return {
            "running": self.running,
            "waiting": self.waiting,
            "waiting_tokens": self.waiting_tokens,
            "inferences": self.inferences,
            "preparing": self.preparing,
        }

    @property
    def empty(self) -> bool:
        return not self._requests

    def request_ids(self) -> tuple[str, ...]:
        """The ids of all requests in the table, each once."""
        return tuple(dict.fromkeys(request.submit.rid for request in self._requests.values()))

    # Messages of front ends

    def receive(self, peer: bytes, message: ToWorker) -> None:
        """Handles a message of the front end whose ZeroMQ routing id is ``peer``."""
        match message:
            case Submit():
                self._submit(peer, message)
            case Cancel(rid, attempt):
                self._cancel(_key(peer, rid, attempt))
            case Tokenize() | Detokenize():
                self._inquire(peer, message)
            case Ping(token):
                self._wire.send(peer, Pong(token))

    def _submit(self, peer: bytes, submit: Submit) -> None:
        key = _key(peer, submit.rid, submit.attempt)
        if key in self._requests:
            return  # the front end has sent the message twice
        rejection = self._refusal(submit)
        if rejection is not None:
            self._wire.send(peer, rejection)
            return
        self._requests[key] = RequestState(peer, submit, key)
        self._preparation.prepare(key, submit)

    def _inquire(self, peer: bytes, inquiry: Inquiry) -> None:
        rid, attempt = inquiry.rid, inquiry.attempt
        if self._leaving:
            leaving = "this worker is being replaced"
            self._wire.send(peer, Rejected(rid, attempt, "leaving", leaving))
        elif self._inquiries >= MAX_INQUIRIES:
            busy = f"{self._inquiries} requests for tokens or text are waiting already"
            self._wire.send(peer, Rejected(rid, attempt, "full", busy, retry_after_s=1.0))
        else:
            self._inquiries += 1
            self._preparation.answer(peer, inquiry)

    def _refusal(self, submit: Submit) -> Rejected | None:
        if self._leaving:
            return Rejected(submit.rid, submit.attempt, "leaving", "this worker is being replaced")
        if self.waiting >= self._max_waiting:
            return Rejected(
                submit.rid,
                submit.attempt,
                "full",
                f"{self.waiting} requests are waiting already",
                retry_after_s=self._until_room(),
            )
        return None

    def _until_room(self) -> float:
        """Returns the seconds, from 1 to 60, until a waiting request is likely to have left the
        queue, by the rate at which requests finished in the last minute; 5 if none finished."""
        now = time.monotonic()
        recent = [t for t in self._finish_times if now - t < 60.0]
        rate = len(recent) / min(60.0, max(1.0, now - recent[0])) if recent else 0.0
        return min(60.0, max(1.0, 1.0 / rate)) if rate else 5.0

    def _cancel(self, key: str) -> None:
        request = self._requests.get(key)
        if request is None:
            return
        self._engine.commands.put(CancelCommand(key))
        submit = request.submit
        self._wire.send(
            request.peer, Finish(submit.rid, submit.attempt, "cancelled", request.usage())
        )
        self._forget(request)

    def peer_lost(self, peer: bytes) -> None:
        """Cancels all requests of a front end that is gone; ``peer`` is its ZeroMQ routing id."""
        for request in [request for request in self._requests.values() if request.peer == peer]:
            self._engine.commands.put(CancelCommand(request.key))
            self._forget(request)

    # Outcomes of preparation

    def inquiry_done(self, done: InquiryDone) -> None:
        """Sends the answer to a Tokenize or Detokenize message to the front end that asked."""
        self._inquiries -= 1
        rid, attempt = done.inquiry.rid, done.inquiry.attempt
        answer: Tokenized | Detokenized | Rejected | Failed
        match done.outcome:
            case InvalidInput() as error:
                answer = _rejection(rid, attempt, error)
            case Exception():
                why = "the worker could not tokenize or detokenize"
                answer = Failed(rid, attempt, "preparation", why)
            case found:
                answer = found
        self._wire.send(done.peer, answer)

    def preparation_done(self, done: PreparationDone) -> None:
        """Starts a prepared request, or ends a request whose preparation failed."""
        request = self._requests.get(done.key)
        if request is None:
            return  # cancelled while it was prepared
        match done.outcome:
            case PreparedRequest() as prepared:
                self._start(request, prepared)
            case InvalidInput() as error:
                submit = request.submit
                self._wire.send(request.peer, _rejection(submit.rid, submit.attempt, error))
                self._forget(request)
            case _:
                why = "the request could not be prepared by the worker"
                self._fail(request, "preparation", why)

    def _start(self, request: RequestState, prepared: PreparedRequest) -> None:
        submit = request.submit
        starts = request.accept(prepared)
        self._by_sequence.update((id, request) for id in request.sequence_ids)
        self._wire.send(
            request.peer,
            Accepted(submit.rid, submit.attempt, prepared.prompt_tokens, prepared.prompt_ids),
        )
        if complete := request.deltas_of_complete_choices():
            self._wire.send(request.peer, Tokens(tuple(complete)))
        if submit.suspect:
            self._waiting_suspects.append((request, starts))
            self._start_next_suspect()
        else:
            self._run(starts)
        self._finish([request])

    def _run(self, starts: Iterable[Start]) -> None:
        for start in starts:
            self._engine.commands.put(start)

    def _start_next_suspect(self) -> None:
        if self._suspect is None and self._waiting_suspects:
            self._suspect, starts = self._waiting_suspects.popleft()
            self._run(starts)

    def _fail(self, request: RequestState, kind: str, message: str) -> None:
        """Ends a request that failed for a reason of its own, for which it would fail on every
        other worker, too."""
        submit = request.submit
        self._wire.send(request.peer, Failed(submit.rid, submit.attempt, kind, message))
        self._forget(request)

    # Events of the engine

    def handle_events(self, events: Iterable[Event]) -> None:
        """Handles events of the engine, in order, and sends the resulting messages to front
        ends."""
        deltas: dict[bytes, list[Delta]] = {}
        touched: dict[str, RequestState] = {}
        failed: list[SequenceFailed] = []
        for event in events:
            match event:
                case StepResult(sampled):
                    self._add_tokens(sampled, deltas, touched)
                case Started(key, cached, total):
                    if (request := self._requests.get(key)) is not None:
                        request.start(cached)
                        self._report_progress(key, cached, total)
                case Prefilled(key, done, total):
                    self._report_progress(key, done, total)
                case PromptScored(key):
                    if (request := self._requests.get(key)) is not None:
                        self._add_scores(request, event, deltas, touched)
                case SequenceFailed():
                    failed.append(event)
        for peer, its in deltas.items():
            self._wire.send(peer, Tokens(tuple(its)))
        for each in failed:  # last, since nothing may follow the end of a request
            if (request := self._by_sequence.get(each.row)) is not None:
                self._engine.commands.put(CancelCommand(request.key))
                self._fail(request, "grammar", each.message)
        self._finish(touched.values())

    def _add_tokens(
        self,
        tokens: list[SampledToken],
        deltas: dict[bytes, list[Delta]],
        touched: dict[str, RequestState],
    ) -> None:
        """Adds the delta of each sampled token to ``deltas``, by the routing id of its front end,
        and each request in which a choice has ended to ``touched``, by its key in the table."""
        for token in tokens:
            request = self._by_sequence.get(token.row)
            if request is None:
                continue
            delta, text_ended = request.add_token(token, self._token_text)
            if delta is None:
                continue
            deltas.setdefault(request.peer, []).append(delta)
            if text_ended:
                self._engine.commands.put(Stop(token.row))
            if delta.finish is not None:
                self.inferences += 1
                self._by_sequence.pop(token.row, None)
                touched[request.key] = request
            if request is self._suspect and request.harmless:
                self._suspect = None
                self._start_next_suspect()

    def _add_scores(
        self,
        request: RequestState,
        scored: PromptScored,
        deltas: dict[bytes, list[Delta]],
        touched: dict[str, RequestState],
    ) -> None:
        """Adds log-probabilities of a prompt to its request, and the last deltas of a request that
        ends with them to ``deltas`` and ``touched``, as :meth:`_add_tokens` does."""
        ids = request.sequence_ids
        for delta in request.add_scores(scored, self._token_text):
            deltas.setdefault(request.peer, []).append(delta)
            self.inferences += 1
            touched[request.key] = request
        for id in set(ids) - set(request.sequence_ids):
            self._by_sequence.pop(id, None)

    def _report_progress(self, key: str, done: int, total: int) -> None:
        request = self._requests.get(key)
        progress = request.progress(done, total) if request else None
        if request and progress:
            self._wire.send(request.peer, progress)

    def _finish(self, requests: Iterable[RequestState]) -> None:
        """Sends Finish for those of ``requests`` in which every choice has ended, and forgets
        them."""
        for request in requests:
            if request.finished:
                submit = request.submit
                finish = Finish(submit.rid, submit.attempt, "done", request.usage())
                self._wire.send(request.peer, finish)
                self._finish_times = [*self._finish_times[-99:], time.monotonic()]
                self._forget(request)

    # Leaving

    def leave(self) -> None:
        """Admits no request from now on: new requests are rejected with the reason ``leaving``."""
        self._leaving = True

    def hand_over(
        self,
        cause: str,
        suspects: Collection[str] = (),
        marked: Collection[str] = (),
        *,
        rebuilt: Engine | None = None,
    ) -> None:
        """Gives every request back to its front end, which continues it on another worker, or on
        this worker if there is a ``rebuilt`` engine. ``cause`` is ``drain`` or the kind of the
        engine's fault. Of the requests in the forward pass that failed, ``suspects`` are the ids of
        those that may have caused the fault, ``marked`` the ids of the others."""
        self._waiting_suspects.clear()
        for request in list(self._requests.values()):
            rid = request.submit.rid
            handover = Handover(
                rid,
                request.submit.attempt,
                cause,
                suspect=rid in suspects,
                marked=rid in marked,
                stays=rebuilt is not None,
            )
            self._wire.send(request.peer, handover)
            self._forget(request)
        if rebuilt is not None:
            self._engine = rebuilt

    def _forget(self, request: RequestState) -> None:
        self._requests.pop(request.key, None)
        for id in request.sequence_ids:
            self._by_sequence.pop(id, None)
        self._waiting_suspects = deque(
            waiting for waiting in self._waiting_suspects if waiting[0] is not request
        )
        if request is self._suspect:
            self._suspect = None
            self._start_next_suspect()


def _key(peer: bytes, rid: str, attempt: int) -> str:
    return f"{peer.hex()}/{rid}/{attempt}"


def _rejection(rid: str, attempt: int, error: InvalidInput) -> Rejected:
    return Rejected(
        rid,
        attempt,
        "invalid",
        error.message,
        error.param,
        error.code,
        prompt_tokens=error.prompt_tokens,
        context=error.context,
    )
