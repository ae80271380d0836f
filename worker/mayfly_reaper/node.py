"""The reaper's process: one thread that polls signals, workers' words and subscribers, asks every
slot's rules what follows, and does it.

It wakes when something happens or something is due, and once a second for the roster. In each
round it takes words in before it looks for exits: what a worker said before it died comes first.
"""

from __future__ import annotations

import logging
import os
import random
import re
import secrets
import signal
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime

import zmq

from mayfly_protocol import codec
from mayfly_protocol.codec import BadFrame
from mayfly_protocol.lifecycle import Fault
from mayfly_protocol.roster import ROSTER_TOPIC, Ask, Done, FromNode, Recycle, SlotView
from mayfly_protocol.sockets import configure
from mayfly_reaper import autopsy
from mayfly_reaper.actions import Action, Record, Send, Signal, Spawn
from mayfly_reaper.errors import StartError
from mayfly_reaper.events import (
    Event,
    Exited,
    NotStarted,
    RecycleAsked,
    Said,
    Started,
    StopAsked,
    Tick,
)
from mayfly_reaper.front_end import FrontEndProcess, listen
from mayfly_reaper.incarnation import STARTING
from mayfly_reaper.numbering import Numbers
from mayfly_reaper.paths import Runtime, locked, opened, runtime_of
from mayfly_reaper.processes import STOP, SignalInbox, set_limits
from mayfly_reaper.roster import Bulletin, loss_of, news, view
from mayfly_reaper.settings import NodeSettings, Observer, Pool
from mayfly_reaper.slot import Slot, SlotRules
from mayfly_reaper.spawn import Spawner, WorkerProcess
from mayfly_reaper.telling import Teller

__all__ = ["Node", "StartError"]

ROSTERS_QUEUED = 16
"""For a subscriber that does not read: each roster is the full picture."""

FRAMES_A_ROUND = 1000
"""So that no flood of words keeps the reaper from looking at the clock."""

_log = logging.getLogger(__name__)


class Node:
    """Workers for every pool, and a front end if the settings have one."""

    def __init__(self, settings: NodeSettings, observer: Observer) -> None:
        self._settings = settings
        self._observer = Teller(observer)

    def run(self) -> int:
        """Serves until SIGTERM, SIGINT or SIGHUP, on the main thread; a second one hurries.

        Returns:
            The process's exit status: 0 after everything has ended in good order.

        Raises:
            StartError: nothing was started.
        """
        settings = self._settings
        runtime = runtime_of(settings.state_dir)
        with ExitStack() as stack:
            stack.enter_context(locked(settings.state_dir))
            stack.enter_context(opened(runtime))
            inbox = stack.enter_context(SignalInbox())
            set_limits()
            loop = _Loop(settings, self._observer, runtime, inbox, stack)
            stack.callback(loop.kill_all)
            loop.run()
        return 0


@dataclass
class _Seat:
    """A slot with what belongs to it outside the rules."""

    slot: Slot
    pool: Pool
    told: tuple[object, ...] = ()
    """What the observer last heard of it."""


class _Loop:
    def __init__(
        self,
        settings: NodeSettings,
        observer: Observer,
        runtime: Runtime,
        inbox: SignalInbox,
        stack: ExitStack,
    ) -> None:
        now = time.monotonic()
        self._observer = observer
        self._inbox = inbox
        self._autopsies = settings.state_dir / "autopsies.jsonl"
        self._epoch = secrets.token_hex(4)
        self._rules = SlotRules(
            settings.budgets,
            draw=random.random,
            number=Numbers(settings.state_dir / "incarnation").take,
        )
        self._seats = {
            name: _Seat(self._rules.begin(name, now), pool) for name, pool in _slots(settings.pools)
        }
        self._processes: dict[int, tuple[str, WorkerProcess]] = {}
        self._bulletin = Bulletin(settings.node, self._epoch, os.getpid(), now)
        self._stops = 0
        self._poller = zmq.Poller()
        # First what can be refused, a port or an option, then what can't.
        self._front_end: FrontEndProcess | None = None
        if settings.front_end is not None:
            listener = listen(settings.front_end.host, settings.front_end.port)
            stack.enter_context(listener)
            self._front_end = FrontEndProcess(
                settings.front_end,
                listener,
                node=runtime.control,
                budgets=settings.budgets,
                poller=self._poller,
                note=observer.note,
                ready=observer.front_end_ready,
            )
        self._spawner = Spawner(settings, runtime, observer.note)
        context = stack.enter_context(zmq.Context())
        self._control = stack.enter_context(context.socket(zmq.ROUTER))
        configure(self._control)
        self._control.bind(runtime.control)
        self._roster = stack.enter_context(context.socket(zmq.XPUB))
        configure(self._roster)
        self._roster.setsockopt(zmq.SNDHWM, ROSTERS_QUEUED)
        # Tell of every subscriber, not of the first to a topic: each is sent a roster at once.
        self._roster.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._roster.bind(runtime.roster)
        for source in (self._inbox, self._control, self._roster):
            self._poller.register(source, zmq.POLLIN)

    def run(self) -> None:
        """Returns when it was asked to stop and everything has ended."""
        while True:
            for name in self._seats:
                self._apply(name, Tick())
            if self._front_end is not None:
                self._front_end.tick(time.monotonic())
            self._publish()
            if self._over():
                return
            self._poller.poll(self._patience_ms())
            for number in self._inbox.take():
                if number in STOP:
                    self._stop(number)
            self._take_words()
            self._take_exits()

    def kill_all(self) -> None:
        """Leaves no process behind, however the loop ended."""
        for _, process in self._processes.values():
            process.kill()
            process.clear()
        self._processes.clear()
        if self._front_end is not None:
            self._front_end.kill()

    def _over(self) -> bool:
        return (
            self._stops > 0
            and all(seat.slot.life is None for seat in self._seats.values())
            and (self._front_end is None or self._front_end.gone)
        )

    def _patience_ms(self) -> int:
        due = min((self._rules.due(seat.slot) for seat in self._seats.values()), default=0.0)
        due = min(due, self._bulletin.due)
        if self._front_end is not None:
            due = min(due, self._front_end.due)
        left = max(0.0, due - time.monotonic())
        return int(left * 1000) + 1 if left else 0  # rounded up: early is once more

    # -- what happens ----------------------------------------------------------------------

    def _stop(self, number: int) -> None:
        self._stops += 1
        hurry = self._stops > 1
        if self._stops == 1:
            self._observer.note(f"{signal.Signals(number).name}: stopping; once more to hurry")
        if self._front_end is not None:
            self._front_end.stop(time.monotonic(), hurry=hurry)
        for name in self._seats:
            self._apply(name, StopAsked(hurry))

    def _take_words(self) -> None:
        for _ in range(FRAMES_A_ROUND):
            try:
                identity, *frames = self._control.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                self._take(identity, frames)
            except BadFrame as error:
                _log.warning("dropped a message of %r: %s", identity[:64], error)
        while self._roster.poll(0):
            if self._roster.recv().startswith(b"\x01"):
                self._bulletin.ask(time.monotonic())

    def _take(self, identity: bytes, frames: list[bytes]) -> None:
        if len(frames) != 1:
            raise BadFrame(f"a message is one frame, not {len(frames)}")
        name, _, number = identity.decode(errors="replace").rpartition("#")
        if name not in self._seats or not number.isdecimal():
            self._reply(identity, self._answer(codec.to_node.decode(frames[0])))
            return
        message = codec.to_reaper.decode(frames[0])
        if isinstance(message, Fault):
            text = f"{name}: {message.scope} fault {message.kind}: {message.first.text}"
            self._observer.note(text)
        self._apply(name, Said(int(number), message))

    def _answer(self, message: Ask | Recycle) -> FromNode:
        match message:
            case Ask():
                return self._bulletin.roster(time.monotonic())
            case Recycle(""):
                names = list(self._seats)
            case Recycle(name):
                names = [name]
        unknown = [name for name in names if name not in self._seats]
        if unknown:
            known = ", ".join(self._seats)
            return Done(False, f"there is no slot {unknown[0]!r} here, but {known}")
        for name in names:
            self._apply(name, RecycleAsked())
        return Done(True, f"recycling {', '.join(names)}")

    def _reply(self, identity: bytes, message: FromNode) -> None:
        try:
            self._control.send_multipart([identity, codec.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # it went away, or does not read
            _log.info("could not answer %r: %s", identity[:64], error)

    def _take_exits(self) -> None:
        for incarnation, (name, process) in list(self._processes.items()):
            status = process.poll()
            if status is not None:
                del self._processes[incarnation]
                stderr = process.stderr.tail()
                process.clear()
                self._apply(name, Exited(incarnation, status, stderr))

    # -- what follows ----------------------------------------------------------------------

    def _apply(self, name: str, event: Event) -> None:
        seat = self._seats[name]
        now = time.monotonic()
        seat.slot, actions = self._rules.step(seat.slot, event, now)
        for action in actions:
            self._do(name, seat, action)
        self._show(seat, view(seat.slot, seat.pool.model_name, now), now)

    def _do(self, name: str, seat: _Seat, action: Action) -> None:
        match action:
            case Spawn(incarnation):
                self._spawn(name, seat, incarnation)
            case Send(incarnation, message):
                try:
                    frames = [f"{name}#{incarnation}".encode(), codec.encode(message)]
                    self._control.send_multipart(frames, zmq.NOBLOCK)
                except zmq.ZMQError as error:  # the ladder's next rung is a signal
                    _log.warning("%s: worker %d does not hear us: %s", name, incarnation, error)
            case Signal(incarnation, number):
                if incarnation in self._processes:
                    self._processes[incarnation][1].signal(number)
            case Record():
                self._record(name, seat, action)

    def _spawn(self, name: str, seat: _Seat, incarnation: int) -> None:
        try:
            process = self._spawner.spawn(name, seat.pool, incarnation)
        except OSError as error:
            self._apply(name, NotStarted(incarnation, str(error)))
            return
        self._processes[incarnation] = (name, process)
        self._apply(name, Started(incarnation, process.pid))

    def _record(self, name: str, seat: _Seat, record: Record) -> None:
        now = time.monotonic()
        self._bulletin.lose(loss_of(name, record), now)
        life = record.life
        lost = f"{name}: lost worker {life.number} (pid {life.pid}): {record.verdict.text}"
        self._observer.note(f"{lost}; {record.done}")
        written = autopsy.autopsy(
            record,
            slot=name,
            model=seat.pool.model_name,
            epoch=self._epoch,
            time=datetime.now(UTC),
            now=now,
        )
        try:
            autopsy.append(self._autopsies, written)
        except OSError as error:
            self._observer.note(f"{name}: the autopsy could not be written: {error}")

    def _show(self, seat: _Seat, view: SlotView, now: float) -> None:
        self._bulletin.show(view, now)
        told = news(view)
        if view.state in STARTING:
            told += (view.phase, view.load_done, view.load_total)
        if told != seat.told:
            seat.told = told
            self._observer.slot_changed(view)

    def _publish(self) -> None:
        now = time.monotonic()
        if now < self._bulletin.due:
            return
        frame = codec.encode(self._bulletin.tell(now))
        self._roster.send_multipart([ROSTER_TOPIC, frame])  # an XPUB drops, it never blocks
        for _, process in self._processes.values():
            process.stderr.trim()


def _slots(pools: tuple[Pool, ...]) -> list[tuple[str, Pool]]:
    """Names the slots after their models: short, and fit for a routing id and a file's name."""
    taken: Counter[str] = Counter()
    slots = []
    for pool in pools:
        short = re.sub(r"[^A-Za-z0-9._-]+", "-", pool.model_name.rstrip("/").rpartition("/")[2])
        short = short.strip(".-")[:40] or "model"
        for _ in range(pool.workers):
            slots.append((f"{short}-{taken[short]}", pool))
            taken[short] += 1
    return slots
