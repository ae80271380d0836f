"""Reaper of a node: one thread that supervises the workers of all slots and the front end.

The loop wakes when a signal, a message or a timer is due, and once a second to publish the roster,
the node's state. Every event of a slot (a place for one worker process) goes through the slot's
rules (:mod:`mayfly_reaper.rules.slot`), and the loop does what the rules ask for. Messages are read
before exits, so that the last messages of a worker are handled before its death.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import signal
import time
from contextlib import ExitStack

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
from mayfly_reaper.managed_slots import (
    ManagedSlot,
    footprint_and_limit,
    memory_in_use,
    memory_promised,
    slot_names,
)
from mayfly_reaper.metrics import NodeMetrics, RefusalTotals, metrics_served
from mayfly_reaper.observer import About, Observer, SafeObserver
from mayfly_reaper.paths import IncarnationNumbers, Runtime, StartError, locked, opened, runtime_of
from mayfly_reaper.processes.children import Children, Orphans, WorkersFile
from mayfly_reaper.processes.front_end import FrontEndProcess, listen
from mayfly_reaper.processes.signals import STOP_SIGNALS, SignalInbox, set_limits
from mayfly_reaper.processes.spawn import Spawner
from mayfly_reaper.publish.roster import RosterPublisher, slot_views, urgent_fields
from mayfly_reaper.publish.sockets import ControlSockets
from mayfly_reaper.recycler import Recycler
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
    Event,
    MessageReceived,
    ProcessEnded,
    SpawnAllowed,
    SpawnDeferred,
    StopRequested,
    Tick,
)
from mayfly_reaper.rules.incarnation import STARTING
from mayfly_reaper.rules.slot import SlotRules
from mayfly_reaper.settings import NodeSettings

__all__ = ["Node", "StartError"]

_log = logging.getLogger(__name__)


class Node:
    """A node: a reaper (the supervisor), the workers of each model in the settings (``pools``), and
    a front end if the settings have one."""

    def __init__(self, settings: NodeSettings, observer: Observer) -> None:
        self._settings = settings
        self._observer = SafeObserver(observer)

    def run(self) -> int:
        """Serves on the main thread until SIGTERM, SIGINT or SIGHUP, or a command to drain; a
        second signal ends the workers at once.

        Returns:
            The process's exit status: 0 after everything has ended in good order.

        Raises:
            StartError: the node cannot start; no worker was started.
        """
        settings = self._settings
        runtime = runtime_of(settings.state_dir)
        with ExitStack() as stack:
            stack.enter_context(locked(settings.state_dir))
            stack.enter_context(opened(runtime))
            inbox = stack.enter_context(SignalInbox())
            set_limits()
            supervisor = Supervisor(settings, self._observer, runtime, inbox, stack)
            stack.callback(supervisor.kill_all)
            if settings.caffeinate:
                stack.enter_context(awake(self._observer.note))
            supervisor.run()
        return 0


class Supervisor:
    """The event loop of the reaper, which watches a node's workers and its front end, and
    everything that the loop uses."""

    def __init__(
        self,
        settings: NodeSettings,
        observer: SafeObserver,
        runtime: Runtime,
        inbox: SignalInbox,
        stack: ExitStack,
    ) -> None:
        now = time.monotonic()
        budgets = settings.budgets
        self._observer = observer
        self._inbox = inbox
        self._stop_signals = 0
        self._stopping = False
        self._poller = zmq.Poller()
        self._poller.register(inbox, zmq.POLLIN)

        numbers = IncarnationNumbers(settings.state_dir / "incarnation")
        self._rules = SlotRules(budgets, draw=random.random, number=numbers.take)
        self._slots = {
            name: ManagedSlot(self._rules.begin(name, now), pool)
            for name, pool in slot_names(settings.pools)
        }
        self._gate = SpawnGate(budgets, memory.measure, random.random)
        self._recycler = Recycler(
            self._slots, self._apply, self._available_memory, budgets.spacing_s, observer
        )
        self._metrics = NodeMetrics(settings.node, memory.measure)
        for managed in self._slots.values():
            self._metrics.add_slot(managed.slot, managed.pool)

        # First what can be refused, a port or an option, then what cannot.
        if settings.metrics.port is not None:
            stack.enter_context(
                metrics_served(self._metrics, settings.metrics.host, settings.metrics.port)
            )
        self._front_end: FrontEndProcess | None = None
        if settings.front_end is not None:
            listener = listen(settings.front_end.host, settings.front_end.port)
            stack.enter_context(listener)
            self._front_end = FrontEndProcess(
                settings.front_end,
                listener,
                node=runtime.control,
                budgets=budgets,
                poller=self._poller,
                note=observer.note,
                ready=observer.front_end_ready,
            )
        self._sockets = ControlSockets(settings, runtime, self._poller, stack, observer.note)
        self._refused = RefusalTotals(self._sockets.refused)
        epoch = secrets.token_hex(4)
        self._roster = RosterPublisher(settings.node, epoch, os.getpid(), now, self._refused.total)
        self._crash_log = CrashLog(
            settings.state_dir / "autopsies.jsonl", epoch, observer, self._roster
        )
        workers_file = WorkersFile(settings.state_dir / "workers.json", observer.note)
        self._orphans = Orphans(workers_file, now + budgets.orphans_s)
        spawner = Spawner(settings, runtime, observer.note)
        self._children = Children(spawner, workers_file, OomWatch())

    def run(self) -> None:
        """Runs the event loop until the node was asked to stop and all its processes have ended."""
        while True:
            self.handle_timers()
            self.publish()
            if self.stopped():
                return
            self._poller.poll(self.poll_timeout_ms())
            self.handle_signals()
            self.handle_messages()
            self.handle_exits()

    def kill_all(self) -> None:
        """Kills all workers and the front end, however the event loop ended."""
        self._children.kill_all()
        if self._front_end is not None:
            self._front_end.kill()

    # -- the loop's verbs ------------------------------------------------------------------

    def handle_timers(self) -> None:
        """Passes the time to every slot (place for a worker), starts the workers that slots are due
        to get, begins the planned replacements of workers that are due, and looks after the front
        end."""
        for name, managed in self._slots.items():
            self._apply(name, Tick())
            now = time.monotonic()
            if self._rules.wants_worker(managed.slot, now):
                self._apply(name, self._deferral(managed, now) or SpawnAllowed())
        front_end = self._front_end
        if front_end is not None:
            if self._stopping and not self._has_workers() and not front_end.stopping:
                front_end.stop(time.monotonic(), hurry=False)
            front_end.tick(time.monotonic())
        self._recycler.begin_due()

    def publish(self) -> None:
        """Shows changed slots to the operator's observer, and publishes the roster (the node's
        state) to front ends if it is due."""
        now = time.monotonic()
        for name, managed in self._slots.items():
            views = slot_views(managed.slot, managed.pool.model_name, now)
            self._roster.update_slot(name, views, now)
            observed = {}
            for view in views:
                fields = urgent_fields(view)
                if view.state in STARTING:
                    fields += (view.phase, view.load_done, view.load_total)
                observed[view.incarnation] = fields
                if fields != managed.observed.get(view.incarnation):
                    self._observer.slot_changed(view)
            managed.observed = observed
        now = time.monotonic()
        if now >= self._roster.due:
            self._sockets.publish(self._roster.next_roster(now))
            self._children.housekeep()

    def stopped(self) -> bool:
        """Returns True once the node was asked to stop and every process has ended."""
        front_end_gone = self._front_end is None or self._front_end.gone
        return self._stopping and not self._has_workers() and front_end_gone

    def poll_timeout_ms(self) -> int:
        """Returns the milliseconds until the next timer, rounded up: a loop that wakes too early
        has to wait a second time."""
        due = min((self._rules.due(each.slot) for each in self._slots.values()), default=0.0)
        due = min(due, self._roster.due)
        if self._front_end is not None:
            due = min(due, self._front_end.due)
        left = max(0.0, due - time.monotonic())
        return int(left * 1000) + 1 if left else 0

    def handle_signals(self) -> None:
        """At the first signal to stop, lets the running requests finish and ends the node; at the
        second, ends all its processes at once."""
        for number in self._inbox.read():
            if number not in STOP_SIGNALS:
                continue
            self._stop_signals += 1
            hurry = self._stop_signals > 1
            if not hurry:
                name = signal.Signals(number).name
                self._observer.note(f"{name}: the node stops; a second signal ends it at once")
            self._stopping = True
            if self._front_end is not None:
                self._front_end.stop(time.monotonic(), hurry=hurry)
            for name in self._slots:
                self._apply(name, StopRequested(hurry))

    def handle_messages(self) -> None:
        """Handles the messages of workers, and answers front ends and the command line."""
        for identity, frames in self._sockets.local_messages():
            try:
                self._handle_local_message(identity, frames)
            except BadFrame as error:
                _log.warning("dropped a malformed message of peer %r: %s", identity[:64], error)
        for request in self._sockets.network_requests():
            request.answer(self._answer(request.message))
        if self._sockets.has_new_subscriber():
            self._roster.publish_soon(time.monotonic())

    def handle_exits(self) -> None:
        """Passes the end of each worker process to its slot's rules, and publishes the loss before
        the files that the process has left are read."""
        ended = self._children.ended()
        for name, number in ended:
            self._apply(name, ProcessEnded(number))
        if ended:
            self.publish()  # before the files of the dead are read and removed: disks are slow
        slots = self._slots.values()
        for name, exited in self._children.exits(lambda n: footprint_and_limit(slots, n)):
            self._apply(name, exited)

    # -- messages --------------------------------------------------------------------------

    def _handle_local_message(self, identity: bytes, frames: list[bytes]) -> None:
        if len(frames) != 1:
            raise BadFrame(f"a message is one frame, not {len(frames)}")
        name, _, digits = identity.decode(errors="replace").rpartition("#")
        if name not in self._slots or not digits.isdecimal():
            self._sockets.reply(identity, self._answer(codec.to_node.decode(frames[0])))
            return
        message, number = codec.to_reaper.decode(frames[0]), int(digits)
        if isinstance(message, Beat) and number in self._slots[name].incarnations:
            self._refused.report(number, message.refused)
        # A fault that its process does not survive is noted with the loss.
        if isinstance(message, Fault) and message.scope in ("request", "batch", "recycle"):
            fault = f"{message.scope} fault {message.kind}: {message.first.text}"
            text = f"worker {number} of slot {name} survived the {fault}"
            self._observer.note(text, About(name, number, bad=True))
        self._apply(name, MessageReceived(number, message))

    def _answer(self, message: ToNode) -> FromNode:
        match message:
            case Ask():
                return self._roster.roster(time.monotonic())
            case AskMetrics():
                return MetricsText(self._metrics.exposition().decode())
            case Quarantine() | Release():
                return self._roster.change_quarantine(message, time.monotonic())
            case DrainNode(grace_s):
                return self._drain(grace_s)
            case Recycle(name):
                return self._recycler.request([name] if name else list(self._slots))

    def _drain(self, grace_s: float) -> Done:
        """Makes the workers leave, after at most ``grace_s`` seconds for their running requests.
        The front end, through which these requests are answered, is stopped only after the workers
        have ended."""
        if self._stopping:
            return Done(True, "this node is stopping already")
        self._stopping = True
        self._observer.note(f"the node drains: requests may go on for {grace_s:g} s, then it ends")
        for name in self._slots:
            self._apply(name, StopRequested(grace_s=grace_s))
        return Done(True, f"draining {', '.join(self._slots)}")

    # -- slots -----------------------------------------------------------------------------

    def _has_workers(self) -> bool:
        return any(managed.slot.workers for managed in self._slots.values())

    def _available_memory(self) -> int:
        return self._gate.memory(time.monotonic()).available

    def _deferral(self, managed: ManagedSlot, now: float) -> SpawnDeferred | None:
        """Returns the reason why a slot cannot get its next worker now, with the time of the next
        check; None if it can."""
        orphans = self._orphans.poll(now)
        in_the_way = [each for each in orphans if each.slot not in self._slots]
        in_the_way += [each for each in orphans if each.slot == managed.slot.name]
        if in_the_way:
            pids = ", ".join(str(each.pid) for each in in_the_way)
            reason = f"waits for the worker of an earlier reaper to leave (pid {pids})"
            return SpawnDeferred(now + CHECK_AGAIN_S / 2, reason, "orphans")
        slots = self._slots.values()
        return self._gate.deferral(
            managed.slot, now, in_use=memory_in_use(slots), promised=memory_promised(slots)
        )

    def _apply(self, name: str, event: Event) -> None:
        """Passes an event to the rules of the slot ``name``, and does what the rules ask for."""
        managed, now = self._slots[name], time.monotonic()
        before, incarnations = managed.slot, managed.incarnations
        managed.slot, actions = self._rules.step(before, event, now)
        for number in incarnations - managed.incarnations:
            self._refused.end(number)
        self._metrics.count_step(before, event, managed.slot, actions, now)
        for action in actions:
            self._do(name, managed, action)

    def _do(self, name: str, managed: ManagedSlot, action: Action) -> None:
        match action:
            case Spawn(number, mitigations):
                self._apply(name, self._children.spawn(name, managed.pool, number, mitigations))
            case SendMessage(number, message):
                self._sockets.send_to_worker(name, number, message)
            case SendSignal(number, which):
                self._children.signal(number, which)
            case WipeKernels():
                self._children.wipe_kernels(name)
            case AnnounceLoss():
                self._announce_loss(name, action)
            case RecordLoss():
                self._crash_log.add(name, managed.pool.model_name, action)

    def _announce_loss(self, name: str, loss: AnnounceLoss) -> None:
        now = time.monotonic()
        exited, number = loss.worker.exit, loss.worker.number
        crumb = exited.crumb if exited is not None else self._children.breadcrumb(number)
        self._roster.add_loss(loss_for_roster(name, loss.worker, loss.verdict, crumb), now)
        if loss.verdict.scope == "machine":
            self._gate.pause_after_fault(loss.verdict.text, now)
