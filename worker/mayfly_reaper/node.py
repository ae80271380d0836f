"""The reaper's process: one thread that polls signals, workers' words and subscribers, asks every
slot's rules what follows, and does it.

It wakes when something happens or something is due, and once a second for the roster. In each
round it takes words in before it looks for exits: what a worker said before it died comes first.

The slots of a node, each with what belongs to it outside the rules.
"""

from __future__ import annotations

import logging
import os
import random
import re
import secrets
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import zmq

from mayfly_protocol import codec
from mayfly_protocol.codec import BadFrame
from mayfly_protocol.lifecycle import Beat, Fault
from mayfly_protocol.roster import (
    Ask,
    AskMetrics,
    Done,
    DrainNode,
    FromNode,
    MetricsText,
    Quarantine,
    Recycle,
    Release,
    ToNode,
)
from mayfly_reaper.crash_log import CrashLog, loss_for_roster
from mayfly_reaper.machine import memory
from mayfly_reaper.machine.caffeinate import awake
from mayfly_reaper.machine.oom import OomWatch
from mayfly_reaper.machine.spawn_gate import CHECK_AGAIN_S, SpawnGate
from mayfly_reaper.metrics import NodeMetrics, RefusalTotals, metrics_served
from mayfly_reaper.observer import About, Observer, SafeObserver
from mayfly_reaper.paths import IncarnationNumbers, Runtime, StartError, locked, opened, runtime_of
from mayfly_reaper.processes.children import Children, Orphans, WorkersFile
from mayfly_reaper.processes.front_end import FrontEndProcess, listen
from mayfly_reaper.processes.signals import STOP, SignalInbox, set_limits
from mayfly_reaper.processes.spawn import Spawner
from mayfly_reaper.publish.roster import RosterPublisher, slot_views, urgent_fields
from mayfly_reaper.publish.sockets import ControlSockets
from mayfly_reaper.rules import recycle
from mayfly_reaper.rules.actions import (
    Action,
    AnnounceLoss,
    RecordLoss,
    SendMessage,
    SendSignal,
    Spawn,
    WipeKernels,
)
from mayfly_reaper.rules.events import (
    Ended,
    Event,
    MessageReceived,
    RecycleRequested,
    SpawnAllowed,
    SpawnDeferred,
    StopRequested,
    Tick,
)
from mayfly_reaper.rules.incarnation import STARTING
from mayfly_reaper.rules.slot import Slot, SlotRules
from mayfly_reaper.settings import NodeSettings, Pool


@dataclass
class Seat:
    """``told`` is what the observer last heard of each of its incarnations."""

    slot: Slot
    pool: Pool
    told: dict[int, tuple[object, ...]] = field(default_factory=dict)


def named(pools: Iterable[Pool]) -> Iterator[tuple[str, Pool]]:
    """Names the slots after their models: short, and fit for a routing id and a file's name."""
    taken: Counter[str] = Counter()
    for pool in pools:
        short = re.sub(r"[^A-Za-z0-9._-]+", "-", pool.model_name.rstrip("/").rpartition("/")[2])
        short = short.strip(".-")[:40] or "model"
        for _ in range(pool.workers):
            yield f"{short}-{taken[short]}", pool
            taken[short] += 1


def incarnation_numbers(seat: Seat) -> set[int]:
    """Those of a slot's workers."""
    return {worker.number for _, worker in seat.slot.workers}


def living_workers(seats: Iterable[Seat]) -> int:
    """The memory of all workers that run, in bytes."""
    return sum(
        worker.beat.memory.footprint
        for seat in seats
        for _, worker in seat.slot.workers
        if worker.beat is not None
    )


def promised(seats: Iterable[Seat]) -> int:
    """What those that are still loading will take beyond what they have, in bytes."""
    return sum(
        max(0, seat.slot.memory_needed - worker.peak_footprint)
        for seat in seats
        for _, worker in seat.slot.workers
        if worker.state in STARTING
    )


def footprint(seats: Iterable[Seat], incarnation: int) -> tuple[int, int]:
    """The last known memory of a worker, and what it may have, in bytes."""
    for seat in seats:
        for _, worker in seat.slot.workers:
            if worker.number == incarnation:
                own = seat.slot.mitigations.memory_limit or seat.pool.options.get("memory_limit")
                limit = own if isinstance(own, int) and own else memory.total()
                return (worker.beat.memory.footprint if worker.beat is not None else 0), limit
    return 0, 0


__all__ = ["Node", "StartError"]

_log = logging.getLogger(__name__)


class Node:
    """Workers for every pool, and a front end if the settings have one."""

    def __init__(self, settings: NodeSettings, observer: Observer) -> None:
        self._settings = settings
        self._observer = SafeObserver(observer)

    def run(self) -> int:
        """Serves until SIGTERM, SIGINT or SIGHUP, or until it is told to drain, on the main
        thread; a second signal hurries.

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
            if settings.caffeinate:
                stack.enter_context(awake(self._observer.note))
            loop.run()
        return 0


class _Loop:
    def __init__(
        self,
        settings: NodeSettings,
        observer: SafeObserver,
        runtime: Runtime,
        inbox: SignalInbox,
        stack: ExitStack,
    ) -> None:
        now = time.monotonic()
        self._budgets = settings.budgets
        self._observer = observer
        self._inbox = inbox
        self._epoch = secrets.token_hex(4)
        self._rules = SlotRules(
            settings.budgets,
            draw=random.random,
            number=IncarnationNumbers(settings.state_dir / "incarnation").take,
        )
        self._seats = {
            name: Seat(self._rules.begin(name, now), pool) for name, pool in named(settings.pools)
        }
        self._metrics = NodeMetrics(settings.node, memory.measure)
        for seat in self._seats.values():
            self._metrics.add_slot(seat.slot, seat.pool)
        metrics = settings.metrics
        if metrics.port is not None:
            stack.enter_context(metrics_served(self._metrics, metrics.host, metrics.port))
        self._host = SpawnGate(settings.budgets, memory.measure, random.random)
        self._asked: dict[str, int] = {}
        """Slots that somebody wants recycled, and which of their workers was meant."""
        self._signals = 0
        self._stopping = False
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
        self._board = ControlSockets(settings, runtime, self._poller, stack, observer.note)
        self._refused = RefusalTotals(self._board.refused)
        self._bulletin = RosterPublisher(
            settings.node, self._epoch, os.getpid(), now, self._refused.total
        )
        autopsies = settings.state_dir / "autopsies.jsonl"
        self._records = CrashLog(autopsies, self._epoch, observer, self._bulletin)
        ledger = WorkersFile(settings.state_dir / "workers.json", observer.note)
        self._orphans = Orphans(ledger, now + settings.budgets.orphans_s)
        self._children = Children(Spawner(settings, runtime, observer.note), ledger, OomWatch())
        self._poller.register(self._inbox, zmq.POLLIN)

    def run(self) -> None:
        """Returns when it was asked to stop and everything has ended."""
        while True:
            self._pass_time()
            self._renew()
            self._tell()
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
        self._children.kill_all()
        if self._front_end is not None:
            self._front_end.kill()

    @property
    def _lives(self) -> bool:
        """Whether any worker is left."""
        return any(seat.slot.workers for seat in self._seats.values())

    def _over(self) -> bool:
        front_end_gone = self._front_end is None or self._front_end.gone
        return self._stopping and not self._lives and front_end_gone

    def _patience_ms(self) -> int:
        due = min((self._rules.due(seat.slot) for seat in self._seats.values()), default=0.0)
        due = min(due, self._bulletin.due)
        if self._front_end is not None:
            due = min(due, self._front_end.due)
        left = max(0.0, due - time.monotonic())
        return int(left * 1000) + 1 if left else 0  # rounded up: early is once more

    # -- what happens ----------------------------------------------------------------------

    def _pass_time(self) -> None:
        for name, seat in self._seats.items():
            self._apply(name, Tick())
            now = time.monotonic()
            if self._rules.wants_worker(seat.slot, now):
                self._apply(name, self._held(seat, now) or SpawnAllowed())
        front_end = self._front_end
        if front_end is not None:
            if self._stopping and not self._lives and not front_end.stopping:
                front_end.stop(time.monotonic(), hurry=False)
            front_end.tick(time.monotonic())

    def _held(self, seat: Seat, now: float) -> SpawnDeferred | None:
        """What keeps a slot from getting its next worker now."""
        living = self._orphans.look(now)
        own = [each for each in living if each.slot not in self._seats]
        own += [each for each in living if each.slot == seat.slot.name]
        if own:
            pids = ", ".join(str(each.pid) for each in own)
            reason = f"waits for the worker of a reaper before this one to leave (pid {pids})"
            return SpawnDeferred(now + CHECK_AGAIN_S / 2, reason, "orphans")
        everyone = self._seats.values()
        return self._host.deferral(
            seat.slot, now, in_use=living_workers(everyone), promised=promised(everyone)
        )

    def _renew(self) -> None:
        """Begins the planned recycles that are due."""
        pools = defaultdict(list)
        for seat in self._seats.values():
            pools[id(seat.pool)].append(seat)
        now = time.monotonic()
        asked = {
            name
            for name, number in self._asked.items()
            if self._seats[name].slot.incarnation == number
        }
        for pool in pools.values():
            planned = recycle.next_recycle(
                [seat.slot for seat in pool],
                pool[0].pool.lifetime,
                asked,
                lambda: self._host.memory(now).available,
                self._budgets.spacing_s,
                now,
            )
            if planned is not None:
                self._asked.pop(planned.slot, None)
                number = self._seats[planned.slot].slot.incarnation
                self._observer.note(planned.text(number), About(planned.slot, number))
                self._apply(planned.slot, planned.request())

    def _stop(self, number: int) -> None:
        self._signals += 1
        hurry = self._signals > 1
        if not hurry:
            self._observer.note(f"{signal.Signals(number).name}: stopping; once more to hurry")
        self._stopping = True
        if self._front_end is not None:
            self._front_end.stop(time.monotonic(), hurry=hurry)
        for name in self._seats:
            self._apply(name, StopRequested(hurry))

    def _take_words(self) -> None:
        for identity, frames in self._board.words():
            try:
                self._take(identity, frames)
            except BadFrame as error:
                _log.warning("dropped a message of %r: %s", identity[:64], error)
        for question in self._board.questions():
            question.answer(self._answer(question.message))
        if self._board.subscribed():
            self._bulletin.publish_soon(time.monotonic())

    def _take(self, identity: bytes, frames: list[bytes]) -> None:
        if len(frames) != 1:
            raise BadFrame(f"a message is one frame, not {len(frames)}")
        name, _, number = identity.decode(errors="replace").rpartition("#")
        if name not in self._seats or not number.isdecimal():
            self._board.reply(identity, self._answer(codec.to_node.decode(frames[0])))
            return
        message = codec.to_reaper.decode(frames[0])
        if isinstance(message, Beat) and int(number) in incarnation_numbers(self._seats[name]):
            self._refused.report(int(number), message.refused)
        # Of a fault that its process does not outlive, the note about the loss will tell.
        if isinstance(message, Fault) and message.scope in ("request", "batch", "recycle"):
            text = f"{name}: {message.scope} fault {message.kind}: {message.first.text}"
            self._observer.note(text, About(name, int(number), bad=True))
        self._apply(name, MessageReceived(int(number), message))

    def _answer(self, message: ToNode) -> FromNode:
        match message:
            case Ask():
                return self._bulletin.roster(time.monotonic())
            case AskMetrics():
                return MetricsText(self._metrics.exposition().decode())
            case Quarantine() | Release():
                return self._bulletin.change_quarantine(message, time.monotonic())
            case DrainNode(grace_s):
                return self._drain(grace_s)
            case Recycle(name):
                return self._recycle([name] if name else list(self._seats))

    def _recycle(self, names: list[str]) -> Done:
        unknown = [name for name in names if name not in self._seats]
        if unknown:
            known = ", ".join(self._seats)
            return Done(False, f"there is no slot {unknown[0]!r} here, but {known}")
        fresh = []
        for name in names:
            slot = self._seats[name].slot
            if slot.state == "ready":
                self._asked[name] = slot.incarnation
            elif slot.current is None:
                self._apply(name, RecycleRequested())
            else:
                fresh.append(name)
        if fresh:
            return Done(True, f"{', '.join(fresh)}: a new worker is on its way already")
        return Done(True, f"recycling {', '.join(names)}")

    def _drain(self, grace_s: float) -> Done:
        """The workers first: what runs goes on through the front end, which follows them."""
        if self._stopping:
            return Done(True, "this node is stopping already")
        self._stopping = True
        self._observer.note(f"draining: what runs may go on for {grace_s:g} s, then the node ends")
        for name in self._seats:
            self._apply(name, StopRequested(grace_s=grace_s))
        return Done(True, f"draining {', '.join(self._seats)}")

    def _take_exits(self) -> None:
        ended = self._children.ended()
        for name, number in ended:
            self._apply(name, Ended(number))
        if ended:
            self._tell()  # whoever looks at what the dead left, and tidies up, waits for the disk
        everyone = self._seats.values()
        for name, exited in self._children.exits(lambda n: footprint(everyone, n)):
            self._apply(name, exited)

    # -- what follows ----------------------------------------------------------------------

    def _apply(self, name: str, event: Event) -> None:
        seat, now = self._seats[name], time.monotonic()
        before, numbers = seat.slot, incarnation_numbers(seat)
        seat.slot, actions = self._rules.step(before, event, now)
        for number in numbers - incarnation_numbers(seat):
            self._refused.end(number)
        self._metrics.count_step(before, event, seat.slot, actions, now)
        for action in actions:
            self._do(name, seat, action)

    def _do(self, name: str, seat: Seat, action: Action) -> None:
        match action:
            case Spawn(incarnation, mitigations):
                self._apply(name, self._children.spawn(name, seat.pool, incarnation, mitigations))
            case SendMessage(incarnation, message):
                self._board.tell_worker(name, incarnation, message)
            case SendSignal(incarnation, number):
                self._children.signal(incarnation, number)
            case WipeKernels():
                self._children.wipe_kernels(name)
            case AnnounceLoss():
                self._lose(name, action)
            case RecordLoss():
                self._records.add(name, seat.pool.model_name, action)

    def _lose(self, name: str, lost: AnnounceLoss) -> None:
        now = time.monotonic()
        worker = lost.worker
        crumb = (
            worker.exit.crumb if worker.exit is not None else self._children.crumb(worker.number)
        )
        self._bulletin.add_loss(loss_for_roster(name, worker, lost.verdict, crumb), now)
        if lost.verdict.scope == "machine":
            self._host.pause_after_fault(lost.verdict.text, now)

    def _tell(self) -> None:
        self._show()
        self._publish()

    def _show(self) -> None:
        now = time.monotonic()
        for name, seat in self._seats.items():
            shown = slot_views(seat.slot, seat.pool.model_name, now)
            self._bulletin.update_slot(name, shown, now)
            told = {}
            for view in shown:
                told[view.incarnation] = urgent_fields(view)
                if view.state in STARTING:
                    told[view.incarnation] += (view.phase, view.load_done, view.load_total)
                if told[view.incarnation] != seat.told.get(view.incarnation):
                    self._observer.slot_changed(view)
            seat.told = told

    def _publish(self) -> None:
        now = time.monotonic()
        if now < self._bulletin.due:
            return
        self._board.publish(self._bulletin.next_roster(now))
        self._children.attend()
