"""All requests of this worker: who asked, how far they are, what is owed.

The desk lives on the main thread. Messages of front ends and events of the engine come in, commands
for the engine and messages for front ends go out, through the callables it was given; it owns no
socket, no thread and no array.

Requests that may be what workers die of (*suspects*) run beside the others, but only one of them at
a time, in the order in which they came: if this worker dies, it is known of which. The next one
follows when a suspect has ended, or has drawn so many tokens that it has proven harmless.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable

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
    ToFrontEnd,
    Tokenize,
    Tokenized,
    Tokens,
    ToWorker,
)
from mayfly_worker.engine import sequence as engine
from mayfly_worker.prepare import Prepared
from mayfly_worker.request_errors import InvalidInput
from mayfly_worker.request_state import Session, TokenText

Send = Callable[[bytes, ToFrontEnd], None]
Order = Callable[[engine.Command], None]
Prepare = Callable[[str, Submit], None]
"""Starts the preparation of the request with this key; its outcome comes to ``prepared``."""
Inquire = Callable[[bytes, Inquiry], None]
"""Starts to find out what a front end wants to know; the answer comes to ``answered``."""

MAX_INQUIRIES = 256
"""Questions that may wait for their answers."""


class Desk:
    """``max_waiting`` requests may queue beyond those that run. ``token_text`` gives a token id's
    text and bytes."""

    def __init__(
        self,
        *,
        send: Send,
        order: Order,
        prepare: Prepare,
        inquire: Inquire,
        token_text: TokenText,
        max_waiting: int,
    ) -> None:
        self._send = send
        self._order = order
        self._prepare = prepare
        self._inquire = inquire
        self._inquiries = 0
        self._token_text = token_text
        self._max_waiting = max_waiting
        self._sessions: dict[str, Session] = {}
        self._by_row: dict[int, Session] = {}
        self._suspect: Session | None = None
        self._suspects: deque[tuple[Session, list[engine.Start]]] = deque()
        self._leaving = False
        self._finish_times: list[float] = []
        self.inferences = 0

    # What others want to know

    @property
    def running(self) -> int:
        """Requests that have left the queue."""
        return sum(1 for s in self._sessions.values() if s.started)

    @property
    def waiting(self) -> int:
        return len(self._sessions) - self.running

    @property
    def preparing(self) -> int:
        """Requests that the engine knows nothing of yet."""
        return sum(1 for s in self._sessions.values() if s.prepared is None)

    @property
    def waiting_tokens(self) -> int:
        waiting = (s.prepared for s in self._sessions.values() if not s.started)
        return sum(p.prompt_tokens for p in waiting if p)

    def counters(self) -> dict[str, int]:
        """The counters of requests, by their fields in ``WorkerCounters``."""
        return {
            "running": self.running,
            "waiting": self.waiting,
            "waiting_tokens": self.waiting_tokens,
            "inferences": self.inferences,
            "preparing": self.preparing,
        }

    @property
    def empty(self) -> bool:
        return not self._sessions

    def requests(self) -> tuple[str, ...]:
        """The ids of all requests that are here."""
        return tuple(dict.fromkeys(s.submit.rid for s in self._sessions.values()))

    # From front ends

    def received(self, peer: bytes, message: ToWorker) -> None:
        match message:
            case Submit():
                self._submitted(peer, message)
            case Cancel(rid, attempt):
                self._cancelled(_key(peer, rid, attempt))
            case Tokenize() | Detokenize():
                self._asked(peer, message)
            case Ping(token):
                self._send(peer, Pong(token))

    def _submitted(self, peer: bytes, submit: Submit) -> None:
        key = _key(peer, submit.rid, submit.attempt)
        if key in self._sessions:
            return  # a repeat of what runs already
        rejection = self._refusal(submit)
        if rejection is not None:
            self._send(peer, rejection)
            return
        self._sessions[key] = Session(peer, submit, key)
        self._prepare(key, submit)

    def _asked(self, peer: bytes, inquiry: Inquiry) -> None:
        rid, attempt = inquiry.rid, inquiry.attempt
        if self._leaving:
            self._send(peer, Rejected(rid, attempt, "leaving", "this worker is being replaced"))
        elif self._inquiries >= MAX_INQUIRIES:
            busy = f"{self._inquiries} questions are waiting already"
            self._send(peer, Rejected(rid, attempt, "full", busy, retry_after_s=1.0))
        else:
            self._inquiries += 1
            self._inquire(peer, inquiry)

    def answered(self, peer: bytes, answer: Tokenized | Detokenized | Rejected | Failed) -> None:
        """What became of a question."""
        self._inquiries -= 1
        self._send(peer, answer)

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
        """Seconds until the queue is likely to have moved, from the pace of the last minute."""
        now = time.monotonic()
        recent = [t for t in self._finish_times if now - t < 60.0]
        pace = len(recent) / min(60.0, max(1.0, now - recent[0])) if recent else 0.0
        return min(60.0, max(1.0, 1.0 / pace)) if pace else 5.0

    def _cancelled(self, key: str) -> None:
        session = self._sessions.get(key)
        if session is None:
            return
        self._order(engine.Cancel(key))
        submit = session.submit
        self._send(session.peer, Finish(submit.rid, submit.attempt, "cancelled", session.usage()))
        self._forget(session)

    def peer_lost(self, peer: bytes) -> None:
        """A front end is gone: nobody waits for its requests any more."""
        for session in [s for s in self._sessions.values() if s.peer == peer]:
            self._order(engine.Cancel(session.key))
            self._forget(session)

    # From preparation and the engine

    def prepared(self, key: str, outcome: Prepared | InvalidInput) -> None:
        session = self._sessions.get(key)
        if session is None:
            return  # cancelled meanwhile
        submit = session.submit
        if isinstance(outcome, InvalidInput):
            self._send(
                session.peer,
                Rejected(
                    submit.rid,
                    submit.attempt,
                    "invalid",
                    outcome.message,
                    outcome.param,
                    outcome.code,
                ),
            )
            self._forget(session)
            return
        starts = session.accept(outcome)
        self._by_row.update((row, session) for row in session.rows)
        self._send(session.peer, Accepted(submit.rid, submit.attempt, outcome.prompt_tokens))
        if already := session.complete_already():
            self._send(session.peer, Tokens(tuple(already)))
        if submit.suspect:
            self._suspects.append((session, starts))
            self._next_suspect()
        else:
            self._begin(starts)
        self._conclude([session])

    def _begin(self, starts: Iterable[engine.Start]) -> None:
        for start in starts:
            self._order(start)

    def _next_suspect(self) -> None:
        if self._suspect is None and self._suspects:
            self._suspect, starts = self._suspects.popleft()
            self._begin(starts)

    def failed(self, key: str, kind: str, message: str) -> None:
        """A request met a fault of its own that no other attempt would escape."""
        session = self._sessions.get(key)
        if session is None:
            return
        submit = session.submit
        self._send(session.peer, Failed(submit.rid, submit.attempt, kind, message))
        self._forget(session)

    def happened(self, events: Iterable[engine.Event]) -> None:
        """What the engine did, in order."""
        deltas: dict[bytes, list[Delta]] = {}
        touched: dict[str, Session] = {}
        failed: list[engine.SequenceFailed] = []
        for event in events:
            match event:
                case engine.StepResult(drawn):
                    self._drawn(drawn, deltas, touched)
                case engine.Started(key, cached, total):
                    if (session := self._sessions.get(key)) is not None:
                        session.start(cached)
                        self._prefilled(key, cached, total)
                case engine.Prefilled(key, done, total):
                    self._prefilled(key, done, total)
                case engine.SequenceFailed():
                    failed.append(event)
        for peer, its in deltas.items():
            self._send(peer, Tokens(tuple(its)))
        for each in failed:  # nothing may follow the end of a request
            if (session := self._by_row.get(each.row)) is not None:
                self._order(engine.Cancel(session.key))
                self.failed(session.key, "grammar", each.message)
        self._conclude(touched.values())

    def _drawn(
        self,
        drawn: list[engine.SampledToken],
        deltas: dict[bytes, list[Delta]],
        touched: dict[str, Session],
    ) -> None:
        for token in drawn:
            session = self._by_row.get(token.row)
            if session is None:
                continue
            delta, complete = session.drawn(token, self._token_text)
            if delta is None:
                continue
            deltas.setdefault(session.peer, []).append(delta)
            if complete:
                self._order(engine.Stop(token.row))
            if delta.finish is not None:
                self.inferences += 1
                self._by_row.pop(token.row, None)
                touched[session.key] = session
            if session is self._suspect and session.harmless:
                self._suspect = None
                self._next_suspect()

    def _prefilled(self, key: str, done: int, total: int) -> None:
        session = self._sessions.get(key)
        progress = session.prefilled(done, total) if session else None
        if session and progress:
            self._send(session.peer, progress)

    def _conclude(self, sessions: Iterable[Session]) -> None:
        for session in sessions:
            if session.over:
                submit = session.submit
                self._send(
                    session.peer, Finish(submit.rid, submit.attempt, "done", session.usage())
                )
                self._finish_times = [*self._finish_times[-99:], time.monotonic()]
                self._forget(session)

    # Leaving

    def leave(self) -> None:
        """Admits nothing from now on."""
        self._leaving = True

    def hand_over(
        self,
        cause: str,
        suspects: Collection[str] = (),
        marked: Collection[str] = (),
        *,
        stays: bool = False,
    ) -> None:
        """Gives every request back, to be continued elsewhere, or here if this worker ``stays``.
        ``suspects`` and ``marked`` are ids of requests: see :class:`Handover`."""
        self._suspects.clear()
        for session in list(self._sessions.values()):
            rid = session.submit.rid
            handover = Handover(
                rid, session.submit.attempt, cause, rid in suspects, rid in marked, stays
            )
            self._send(session.peer, handover)
            self._forget(session)

    def _forget(self, session: Session) -> None:
        self._sessions.pop(session.key, None)
        for row in session.rows:
            self._by_row.pop(row, None)
        self._suspects = deque(held for held in self._suspects if held[0] is not session)
        if session is self._suspect:
            self._suspect = None
            self._next_suspect()


def _key(peer: bytes, rid: str, attempt: int) -> str:
    return f"{peer.hex()}/{rid}/{attempt}"
