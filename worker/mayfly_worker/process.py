"""The worker process: what happens on its main thread, and how it ends.

::

    stdin EOF --+
    SIGTERM   --+--> leave: admit nothing, finish what runs --> Bye, os._exit
    Drain     --+
    fault     -----> hand everything over, Fault           --> os._exit(70), worn out: 75

The process never ends by returning from ``main``: a process in which a thread used MLX may abort in
its destructors, so every way out is ``os._exit`` after a bounded farewell.

A beat, of all that a worker knows about itself.

A stderr that a full disk does not turn into a fault.

The reaper keeps what a worker writes there in a file. Where that has no room left, Python raises
out of whatever line it was that wanted to say something, be it a library's progress bar or the
report of a fault that the worker would have survived.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import itertools
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NoReturn

import psutil
import structlog
import zmq

from mayfly_protocol.common import logs
from mayfly_protocol.faults import causes
from mayfly_protocol.lifecycle import (
    Beat,
    Bye,
    Drain,
    Exit,
    Fault,
    Hello,
    Loading,
    Ready,
)
from mayfly_protocol.serving import (
    Detokenized,
    Failed,
    Inquiry,
    Rejected,
    Submit,
    Tokenized,
)
from mayfly_protocol.settings import PEER_TIMEOUT_S, WorkerSettings
from mayfly_worker import engine_thread as reports
from mayfly_worker.engine.engine_counters import EngineCounters
from mayfly_worker.engine.scheduler import Engine
from mayfly_worker.engine_thread import EngineThread
from mayfly_worker.model.loading import LoadedModel
from mayfly_worker.model.page_cache import WeightReader
from mayfly_worker.model.reference_store import versions
from mayfly_worker.prepare import Prepared, Preparer, reply
from mayfly_worker.request_errors import InvalidInput
from mayfly_worker.requests import Desk
from mayfly_worker.text.detokenize import TokenTexts
from mayfly_worker.wire import CannotListen, Wire


def beat(
    counters: EngineCounters,
    desk: Desk | None,
    *,
    leaving: bool,
    footprint: int,
    kv_budget: int,
    refused: Mapping[str, int],
) -> Beat:
    """``desk`` is None until the model is loaded; ``footprint`` and ``kv_budget`` are in bytes."""
    values = counters.values() | (desk.counters() if desk else {})
    values["memory"] = replace(counters.memory, footprint=footprint)
    values["kv_budget"] = kv_budget
    values["refused"] = dict(refused)
    return Beat("stopping" if leaving else counters.phase, counters.progress, **values)


class LossyText(io.TextIOWrapper):
    """Text to a file descriptor, unbuffered. What cannot be written is lost."""

    def __init__(self, descriptor: int) -> None:
        raw = io.FileIO(descriptor, "w", closefd=False)
        super().__init__(raw, "utf-8", "backslashreplace", write_through=True)

    def write(self, text: str) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


FAREWELL_S = 1.0
PREPARERS = 2
GIL_LIMIT_S = 60.0
"""When this thread has not run for so long, something holds the GIL and neither a signal nor the
reaper's word arrives any more. A watchdog in C then prints every stack and ends the process."""

Outcome = (
    tuple[str, Prepared | Exception] | tuple[bytes, Tokenized | Detokenized | Exception, Inquiry]
)
"""What a preparer made of a request, by its key, or of a question, by who asked."""

log = structlog.get_logger()


class Worker:
    """One incarnation of a slot. :meth:`run` does not return."""

    def __init__(self, settings: WorkerSettings, warming: WeightReader) -> None:
        self._settings = settings
        self._wire = Wire(settings)
        self._inbox: deque[reports.Report | Outcome] = deque()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._thread = EngineThread(settings, warming, self._post)
        self._pool = ThreadPoolExecutor(PREPARERS, thread_name_prefix="prepare")
        self._engine: Engine | None = None
        self._preparer: Preparer | None = None
        self._desk: Desk | None = None
        self._loading_counters = EngineCounters(phase="loading")
        self._kv_budget = 0
        self._process = psutil.Process()
        self._next_beat = self._next_watchdog = 0.0
        self._leave_by: float | None = None
        self._exit = Exit.BYE
        self._heard: dict[bytes, float] = {}

    # The loop

    def run(self) -> NoReturn:
        """Serves until the process ends."""
        signal.signal(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the reaper's affair
        self._wire.tell_reaper(
            Hello(self._settings.slot, self._settings.incarnation, os.getpid(), versions())
        )
        self._thread.start()
        poller = zmq.Poller()
        stdin = sys.stdin.fileno()
        poller.register(self._wire.reaper, zmq.POLLIN)
        poller.register(self._wire.router, zmq.POLLIN)
        for polled in self._wire.polled:
            poller.register(polled, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        poller.register(stdin, zmq.POLLIN)
        while True:
            ready = {source for source, _ in poller.poll(self._patience_ms())}
            if stdin in ready and not os.read(stdin, 4096):
                poller.unregister(stdin)
                self._leave(Exit.ORPHANED, self._settings.orphan_grace_s)
            if self._woken.fileno() in ready:
                self._woken.recv(4096)
            # A socket is only asked where there is something: each "nothing" is an exception.
            if self._wire.reaper in ready:
                self._hear_reaper()
            while self._inbox:
                self._take(self._inbox.popleft())
            if self._wire.router in ready:
                self._hear_front_ends()
            self._wire.attend()
            self._settle()
            self._beat()
            self._maybe_go()

    def _patience_ms(self) -> int:
        """How long there is nothing to do but to listen."""
        if self._inbox:
            return 0
        until = self._next_beat if self._leave_by is None else min(self._next_beat, self._leave_by)
        patience = max(0.0, until - time.monotonic())
        if not self._wire.outbox.empty:
            patience = min(patience, 0.01)
        return int(patience * 1000) + 1

    def _hear_reaper(self) -> None:
        for message in self._wire.from_reaper():
            if isinstance(message, Drain):
                self._leave(Exit.RECYCLED, message.grace_s)

    def _hear_front_ends(self) -> None:
        desk = self._desk
        assert desk is not None, "nobody can connect before the model is loaded"
        for peer, request in self._wire.from_front_ends():
            self._heard[peer] = time.monotonic()
            desk.received(peer, request)

    def _settle(self) -> None:
        """Sends what waits for slow front ends, and drops those that are gone."""
        outbox = self._wire.outbox
        if not outbox.empty:
            outbox.flush()
        if outbox.lost:
            for peer in outbox.lost & self._heard.keys():
                self._drop(peer)

    def _post(self, report: reports.Report | Outcome) -> None:
        """From any thread to the main one."""
        self._inbox.append(report)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is awake already
            self._waker.send(b"!")

    # What the other threads report

    def _take(self, report: reports.Report | Outcome) -> None:
        match report:
            case list():
                if self._desk is not None:
                    self._desk.happened(report)
            case (str() as key, outcome):
                self._prepared(key, outcome)
            case (bytes() as peer, outcome, inquiry):
                self._answered(peer, outcome, inquiry)
            case reports.LoadProgress(phase, done, total):
                self._loading_counters.progress += 1
                self._wire.tell_reaper(Loading(phase, done, total))
            case reports.LoadedNow():
                self._open(report)
            case reports.LoadFailed():
                self._load_failed(report)
            case reports.Faulted():
                self._faulted(report)
            case reports.Left():
                self._go(self._exit)

    def _open(self, report: reports.LoadedNow) -> None:
        """The model is loaded: lets front ends in."""
        loaded = report.loaded
        self._engine = report.engine
        self._kv_budget = report.budget.kv_bytes
        self._preparer = Preparer(loaded, report.budget, itertools.count())
        self._desk = Desk(
            send=self._wire.send,
            order=self._order,
            prepare=self._prepare,
            inquire=partial(self._inquire, loaded),
            token_text=TokenTexts(loaded.tokenizer),
            max_waiting=self._settings.max_waiting,
        )
        try:
            endpoint = self._wire.listen()
        except CannotListen as error:
            self._load_failed(reports.LoadFailed(error, "load_failed", "worker"))
            return
        self._wire.tell_reaper(Ready(endpoint, loaded.card, self._wire.public_key))

    def _order(self, command: object) -> None:
        assert self._engine is not None
        self._engine.commands.put(command)  # type: ignore[arg-type]

    def _prepare(self, key: str, submit: Submit) -> None:
        preparer = self._preparer
        assert preparer is not None

        def work() -> None:
            try:
                self._post((key, preparer.prepare(submit)))
            except InvalidInput as error:
                self._post((key, error))
            except Exception as error:
                log.exception("a request could not be prepared", rid=submit.rid)
                self._post((key, error))

        self._pool.submit(work)

    def _prepared(self, key: str, outcome: Prepared | Exception) -> None:
        assert self._desk is not None
        if isinstance(outcome, Prepared | InvalidInput):
            self._desk.prepared(key, outcome)
            return
        self._desk.failed(key, "preparation", "the request could not be prepared by the worker")

    def _inquire(self, loaded: LoadedModel, peer: bytes, inquiry: Inquiry) -> None:
        def work() -> None:
            try:
                self._post((peer, reply(inquiry, loaded), inquiry))
            except InvalidInput as error:
                self._post((peer, error, inquiry))
            except Exception as error:
                log.exception("a question could not be answered", rid=inquiry.rid)
                self._post((peer, error, inquiry))

        self._pool.submit(work)

    def _answered(
        self, peer: bytes, outcome: Tokenized | Detokenized | Exception, inquiry: Inquiry
    ) -> None:
        assert self._desk is not None
        rid, attempt = inquiry.rid, inquiry.attempt
        answer: Tokenized | Detokenized | Rejected | Failed
        match outcome:
            case InvalidInput(message=message, param=param, code=code):
                answer = Rejected(rid, attempt, "invalid", message, param, code)
            case Exception():
                answer = Failed(rid, attempt, "preparation", "the worker could not answer")
            case _:
                answer = outcome
        self._desk.answered(peer, answer)

    def _load_failed(self, report: reports.LoadFailed) -> None:
        first, later = causes(report.error)
        log.error("loading failed", cause=first.text, exc_info=report.error)
        self._wire.tell_reaper(Fault(report.kind, report.scope, first, later))
        hopeless = report.scope == "model"
        self._go(Exit.CONFIGURATION if hopeless else Exit.LOAD_FAILED, first.text)

    def _faulted(self, report: reports.Faulted) -> None:
        """Everything in flight goes back; then the new engine serves on, or the process ends."""
        assert self._desk is not None
        first, later = causes(report.error)
        log.error("engine fault", kind=report.verdict.kind, cause=first.text)
        suspects = report.suspects
        self._wire.tell_reaper(
            Fault(
                report.verdict.kind,
                report.verdict.scope,
                first,
                later,
                self._desk.requests(),
                suspects,
            )
        )
        self._desk.hand_over(
            report.verdict.kind, suspects, report.marked, stays=report.rebuilt is not None
        )
        if report.rebuilt is None:
            worn = report.verdict.scope == "recycle"
            self._go(Exit.RECYCLED if worn else Exit.POISONED, first.text)
        self._engine = report.rebuilt

    # Peers, beats, leaving

    def _drop(self, peer: bytes) -> None:
        self._heard.pop(peer, None)
        self._wire.forget(peer)
        if self._desk is not None:
            self._desk.peer_lost(peer)

    def _beat(self) -> None:
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + self._settings.beat_interval_s
        if now >= self._next_watchdog:
            self._next_watchdog = now + 1.0
            faulthandler.dump_traceback_later(GIL_LIMIT_S, exit=True)
        for peer, heard in list(self._heard.items()):
            if now - heard > PEER_TIMEOUT_S:
                self._drop(peer)
        self._report()

    def _report(self) -> None:
        told = beat(
            self._engine.counters if self._engine else self._loading_counters,
            self._desk,
            leaving=self._leave_by is not None,
            footprint=self._process.memory_info().rss,
            kv_budget=self._kv_budget,
            refused=self._wire.refusals.counts,
        )
        self._wire.tell_reaper(told)

    def _terminate(self, *_: object) -> None:
        self._leave(Exit.BYE, 0.0)
        self._wake()

    def _leave(self, code: Exit, grace_s: float) -> None:
        """Admits nothing more, and goes when all is done or the grace is over."""
        by = time.monotonic() + grace_s
        self._leave_by = by if self._leave_by is None else min(by, self._leave_by)
        self._exit = code
        if self._desk is not None:
            self._desk.leave()

    def _maybe_go(self) -> None:
        if self._leave_by is None:
            return
        idle = self._desk is None or self._desk.empty
        if idle or time.monotonic() >= self._leave_by:
            if self._desk is not None:
                self._desk.hand_over("drain")
            self._go(self._exit)

    def _go(self, code: Exit, reason: str = "") -> NoReturn:
        self._report()  # what it did since its last beat counts, too
        self._wire.tell_reaper(Bye(code, reason))
        self._wire.farewell(FAREWELL_S)
        sys.stderr.flush()
        os._exit(code)


def main(settings: WorkerSettings, warming: WeightReader) -> NoReturn:
    """Runs a worker in this process, whose weight files are being read already."""
    sys.stderr = LossyText(sys.stderr.fileno())
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    logs.configure(settings.logs, slot=settings.slot, incarnation=settings.incarnation)
    Worker(settings, warming).run()
