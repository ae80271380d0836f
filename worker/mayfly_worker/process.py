"""Main loop of a worker process, and the ways in which the process ends.

::

    stdin EOF (supervisor gone) --+
    SIGTERM                     --+--> drain: admit nothing, finish what runs --> Bye, os._exit
    Drain message               --+
    fault of the engine -------------> hand all requests over, send Fault     --> os._exit(70),
                                                                       or 75 if only worn out

A process is worn out when something that leaks in it, such as GPU buffers, has reached its limit.

The process never ends by returning from ``main``: a process in which a thread used MLX may abort in
its destructors, so every way out is ``os._exit``, after a bounded wait for the last messages to be
sent.
"""

from __future__ import annotations

import faulthandler
import io
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

import psutil
import structlog
import zmq

from mayfly_protocol.common import logs
from mayfly_protocol.faults import causes
from mayfly_protocol.lifecycle import Beat, Bye, Drain, Exit, Fault, Hello, Loading, Ready
from mayfly_protocol.settings import WorkerSettings
from mayfly_worker.engine.engine_counters import EngineCounters
from mayfly_worker.engine_thread import (
    EngineFault,
    EngineReport,
    EngineThread,
    LoadFailed,
    LoadProgress,
    ModelLoaded,
)
from mayfly_worker.model.page_cache import WeightReader
from mayfly_worker.model.reference_store import versions
from mayfly_worker.model.weight_files import ModelLoadError
from mayfly_worker.prepare import InquiryDone, PreparationDone, PreparationPool
from mayfly_worker.request_table import RequestTable
from mayfly_worker.text.detokenize import TokenTexts
from mayfly_worker.wire import EndpointError, Wire

LINGER_S = 1.0
"""Longest time, in seconds, that the process waits before it exits until its last messages are
sent."""
WATCHDOG_INTERVAL_S = 1.0
GIL_LIMIT_S = 60.0
"""Longest time, in seconds, for which the main thread may stand still. If it stands still longer,
another thread holds the GIL, and neither a signal nor a message of the reaper (the supervisor) has
any effect: then a watchdog written in C prints every thread's stack and ends the process."""

Report = EngineReport | PreparationDone | InquiryDone
"""A report of the engine thread or of a preparation thread to the main thread."""

_log = structlog.get_logger()


class WorkerLoop:
    """Main loop of one worker process: handles messages of front ends (HTTP server processes) and
    of the reaper (the supervisor), and reports of this process's other threads. :meth:`run` does
    not return."""

    def __init__(self, settings: WorkerSettings, weight_reader: WeightReader) -> None:
        self._settings = settings
        self._wire = Wire(settings)
        self._reports: deque[Report] = deque()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._poller = zmq.Poller()
        self._engine_thread = EngineThread(settings, weight_reader, self._post)
        self._counters = EngineCounters(phase="loading")
        self._requests: RequestTable | None = None
        """Table of all requests of this worker; None until the model is loaded."""
        self._kv_budget = 0
        self._process = psutil.Process()
        self._next_beat = self._next_watchdog = 0.0
        self._drain_until: float | None = None
        """Monotonic time, in seconds, by which this worker exits at the latest while it drains
        (admits no more requests and finishes what runs); None while it does not drain."""
        self._exit_code = Exit.BYE

    # The loop

    def run(self) -> NoReturn:
        """Serves requests until the process ends."""
        self._start()
        while True:
            ready = self._wait()
            self._check_stdin(ready)
            self._handle_reaper_messages(ready)
            self._handle_reports()
            self._handle_front_end_messages(ready)
            self._wire.authenticate()
            self._wire.outbox.flush()
            self._drop_peers(self._wire.take_lost_peers())
            self._beat()
            self._exit_if_drained()

    def _start(self) -> None:
        signal.signal(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the reaper handles a terminal's Ctrl-C
        for polled in (*self._wire.all_sockets, self._woken, sys.stdin.fileno()):
            self._poller.register(polled, zmq.POLLIN)
        self._wire.send_to_reaper(
            Hello(self._settings.slot, self._settings.incarnation, os.getpid(), versions())
        )
        self._engine_thread.start()

    def _wait(self) -> set[object]:
        """Waits for input, for a report of another thread, or for the next timer. Returns the
        sockets and file descriptors that can be read."""
        ready: set[object] = {source for source, _ in self._poller.poll(self._timeout_ms())}
        if self._woken.fileno() in ready:
            self._woken.recv(4096)
        return ready

    def _timeout_ms(self) -> int:
        """Returns the milliseconds until the main loop has to run again even if nothing arrives."""
        if self._reports:
            return 0
        until = self._next_beat
        if self._drain_until is not None:
            until = min(until, self._drain_until)
        timeout = max(0.0, until - time.monotonic())
        if not self._wire.outbox.empty:
            timeout = min(timeout, 0.01)
        return int(timeout * 1000) + 1

    def _check_stdin(self, ready: set[object]) -> None:
        """Lets this worker finish its requests and exit once stdin is closed, which means that the
        reaper (the supervisor) is gone."""
        stdin = sys.stdin.fileno()
        if stdin in ready and not os.read(stdin, 4096):
            self._poller.unregister(stdin)
            self._drain(Exit.ORPHANED, self._settings.orphan_grace_s)

    # Only readable sockets are read: each read of an empty one costs an exception.

    def _handle_reaper_messages(self, ready: set[object]) -> None:
        if self._wire.reaper in ready:
            for message in self._wire.receive_from_reaper():
                if isinstance(message, Drain):
                    self._drain(Exit.RECYCLED, message.grace_s)

    def _handle_front_end_messages(self, ready: set[object]) -> None:
        if self._wire.router in ready:
            assert self._requests is not None, (
                "front ends cannot connect before the model is loaded"
            )
            for peer, message in self._wire.receive_from_front_ends():
                self._requests.receive(peer, message)

    def _drop_peers(self, peers: Iterable[bytes]) -> None:
        for peer in peers:
            if self._requests is not None:
                self._requests.peer_lost(peer)

    # Reports of other threads

    def _post(self, report: Report) -> None:
        """Hands a report to the main thread; called from the other threads."""
        self._reports.append(report)
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # enough wake-ups are unread
            self._waker.send(b"!")

    def _handle_reports(self) -> None:
        while self._reports:
            self._handle_report(self._reports.popleft())

    def _handle_report(self, report: Report) -> None:
        match report:
            case LoadProgress(phase, done, total):
                self._counters.progress += 1
                self._wire.send_to_reaper(Loading(phase, done, total))
            case ModelLoaded():
                self._open(report)
            case LoadFailed():
                self._exit_unloaded(report)
            case EngineFault():
                self._handle_fault(report)
            case _:
                assert self._requests is not None, "nothing runs before the model is loaded"
                match report:
                    case list():
                        self._requests.handle_events(report)
                    case PreparationDone():
                        self._requests.preparation_done(report)
                    case InquiryDone():
                        self._requests.inquiry_done(report)

    def _open(self, report: ModelLoaded) -> None:
        """Lets front ends connect, now that the model is loaded."""
        loaded = report.loaded
        self._counters = report.engine.counters
        self._kv_budget = report.budget.kv_bytes
        self._requests = RequestTable(
            self._wire,
            PreparationPool(loaded, report.budget, self._post),
            report.engine,
            token_text=TokenTexts(loaded.tokenizer),
            max_waiting=self._settings.max_waiting,
        )
        try:
            endpoint = self._wire.listen()
        except EndpointError as error:
            self._exit_unloaded(LoadFailed(error, "load_failed", "worker"))
        self._wire.send_to_reaper(Ready(endpoint, loaded.card, self._wire.public_key))

    def _exit_unloaded(self, report: LoadFailed) -> NoReturn:
        first, later = causes(report.error)
        if isinstance(report.error, ModelLoadError):
            # It says what is wrong with the folder; its causes are how the libraries found out.
            raised = (first, *later)
            first, later = replace(raised[-1], traceback="\n".join(c.traceback for c in raised)), ()
        _log.error(
            "this worker cannot become ready and exits",
            cause=first.text,
            exc_info=report.error,
        )
        self._wire.send_to_reaper(Fault(report.kind, report.scope, first, later))
        hopeless = report.scope == "model"
        self._exit(Exit.CONFIGURATION if hopeless else Exit.LOAD_FAILED, first.text)

    def _handle_fault(self, report: EngineFault) -> None:
        """Gives every request back to its front end after a fault of the engine; then the rebuilt
        engine serves, or, if there is none, the process ends."""
        assert self._requests is not None
        first, later = causes(report.error)
        verdict, rids = report.verdict, self._requests.request_ids()
        then = "this worker exits" if report.rebuilt is None else "a new engine serves on"
        _log.error(
            f"engine fault: all requests are handed over, and {then}",
            kind=verdict.kind,
            cause=first.text,
            requests=len(rids),
        )
        self._wire.send_to_reaper(
            Fault(verdict.kind, verdict.scope, first, later, rids, report.suspects)
        )
        self._requests.hand_over(
            verdict.kind, report.suspects, report.marked, rebuilt=report.rebuilt
        )
        if report.rebuilt is None:
            worn = verdict.scope == "recycle"
            self._exit(Exit.RECYCLED if worn else Exit.POISONED, first.text)

    # Beats

    def _beat(self) -> None:
        """Sends a heartbeat to the reaper (the supervisor) if the next one is due; also re-arms the
        watchdog that ends a process whose main thread stands still, and drops front ends that have
        fallen silent."""
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + self._settings.beat_interval_s
        if now >= self._next_watchdog:
            self._next_watchdog = now + WATCHDOG_INTERVAL_S
            faulthandler.dump_traceback_later(GIL_LIMIT_S, exit=True)
        self._drop_peers(self._wire.take_silent_peers())
        self._send_beat()

    def _send_beat(self) -> None:
        self._wire.send_to_reaper(
            make_beat(
                self._counters,
                self._requests,
                draining=self._drain_until is not None,
                footprint=self._process.memory_info().rss,
                kv_budget=self._kv_budget,
                refused=self._wire.refusals.counts,
            )
        )

    # The end

    def _terminate(self, *_: object) -> None:
        """Handles SIGTERM: all requests are given back to their front ends, which continue them on
        other workers, and the process exits."""
        self._drain(Exit.BYE, 0.0)
        self._wake()

    def _drain(self, code: Exit, grace_s: float) -> None:
        """Admits no more requests; the process exits with ``code`` as soon as no request is left,
        or after ``grace_s`` seconds, when the rest are given back to their front ends."""
        until = time.monotonic() + grace_s
        self._drain_until = until if self._drain_until is None else min(until, self._drain_until)
        self._exit_code = code
        if self._requests is not None:
            self._requests.leave()

    def _exit_if_drained(self) -> None:
        if self._drain_until is None:
            return
        idle = self._requests is None or self._requests.empty
        if idle or time.monotonic() >= self._drain_until:
            if self._requests is not None:
                self._requests.hand_over("drain")
            self._exit(self._exit_code)

    def _exit(self, code: Exit, reason: str = "") -> NoReturn:
        self._send_beat()  # with the counters since the last heartbeat
        self._wire.send_to_reaper(Bye(code, reason))
        self._wire.close(LINGER_S)
        sys.stderr.flush()
        os._exit(code)


def make_beat(
    counters: EngineCounters,
    requests: RequestTable | None,
    *,
    draining: bool,
    footprint: int,
    kv_budget: int,
    refused: Mapping[str, int],
) -> Beat:
    """Makes a heartbeat message from the counters of the engine and of the request table.
    ``requests`` is None until the model is loaded; ``footprint`` (resident memory of the process)
    and ``kv_budget`` (limit of the KV caches) are in bytes; ``refused`` counts refused peers by
    reason."""
    values = counters.values() | (requests.counters() if requests else {})
    values["memory"] = replace(counters.memory, footprint=footprint)
    values["kv_budget"] = kv_budget
    values["refused"] = dict(refused)
    return Beat("stopping" if draining else counters.phase, counters.progress, **values)


class LossyText(io.TextIOWrapper):
    """Unbuffered text stream to a file descriptor; text that cannot be written is lost without an
    error.

    It replaces ``sys.stderr``, which the reaper (the supervisor) keeps in a file. Where the disk is
    full, Python's own stream would raise out of any line that writes to stderr, be it a library's
    progress bar or the report of a fault that the worker would have survived.
    """

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


def main(settings: WorkerSettings, weight_reader: WeightReader) -> NoReturn:
    """Runs a worker in this process; ``weight_reader`` is reading the model's weight files
    already."""
    sys.stderr = LossyText(sys.stderr.fileno())
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    logs.configure(settings.logs, slot=settings.slot, incarnation=settings.incarnation)
    WorkerLoop(settings, weight_reader).run()
