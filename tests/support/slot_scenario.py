"""Drives the rules of a slot (the reaper's place for one worker process at a time) with a sequence
of events, without processes or a real clock."""

from __future__ import annotations

import itertools

from mayfly_protocol.lifecycle import (
    Beat,
    Cause,
    Fault,
    Hello,
    ModelCard,
    Ready,
    Scope,
    ToReaper,
)
from mayfly_reaper.rules.actions import Action, AnnounceLoss, RecordLoss, Spawn
from mayfly_reaper.rules.events import (
    Event,
    MessageReceived,
    ProcessExited,
    ProcessStarted,
    SpawnAllowed,
    Tick,
)
from mayfly_reaper.rules.slot import Slot, SlotRules
from mayfly_reaper.rules.worker import LAST_MESSAGES_S
from mayfly_reaper.settings import Budgets

BUDGETS = Budgets()
IDLE = Beat(phase="idle", progress=0)
READY = Ready("ipc:///w1", ModelCard(digest="d"))


class Scenario:
    """A slot, driven event by event, and in ``lost`` the losses of workers that it has announced.
    The random part of its waits is 0."""

    def __init__(self, budgets: Budgets = BUDGETS) -> None:
        self.budgets = budgets
        self.rules = SlotRules(budgets, lambda: 0.0, itertools.count(1).__next__)
        self.now = 100.0
        self.lost: list[AnnounceLoss] = []
        self.slot: Slot = self.rules.begin("s", self.now)

    def apply(self, event: Event) -> list[Action]:
        """Gives the slot an event and returns its actions, except announcements of losses, which go
        to ``lost``. If the slot wants to start a worker, permission follows at once, as from a
        node."""
        self.slot, actions = self.rules.step(self.slot, event, self.now)
        if self.rules.wants_worker(self.slot, self.now):
            self.slot, more = self.rules.step(self.slot, SpawnAllowed(), self.now)
            actions += more
        self.lost += [action for action in actions if isinstance(action, AnnounceLoss)]
        return [action for action in actions if not isinstance(action, AnnounceLoss)]

    def receive(self, message: ToReaper, incarnation: int | None = None) -> list[Action]:
        return self.apply(MessageReceived(incarnation or self.slot.incarnation, message))

    def exit(self, status: int, stderr: str = "") -> list[Action]:
        """Lets the slot's worker process exit, and lets the time pass for which the slot waits for
        the worker's last messages; returns the slot's actions."""
        actions = self.apply(ProcessExited(self.slot.incarnation, status, stderr))
        return actions + self.wait(LAST_MESSAGES_S)

    def wait(self, seconds: float, beat: Beat | None = None) -> list[Action]:
        """Lets ``seconds`` pass in ticks of 0.5 s; before each tick every worker sends the
        heartbeat ``beat``, if given. Returns the slot's actions."""
        actions = []
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            if beat is not None:
                for _, worker in self.slot.workers:
                    actions += self.receive(beat, worker.number)
            actions += self.apply(Tick())
        return actions

    def start(self) -> Scenario:
        assert self.apply(Tick()) == [Spawn(self.slot.incarnation)]
        self.apply(ProcessStarted(self.slot.incarnation, 4711))
        return self

    def ready(self, ready: Ready = READY) -> Scenario:
        if self.slot.current is None:
            self.start()
        self.receive(Hello("s", self.slot.incarnation, 4711))
        self.receive(ready)
        self.receive(IDLE)
        assert self.slot.state == "ready"
        return self

    def steady(self) -> Scenario:
        self.ready().wait(self.budgets.steady_s, beat=IDLE)
        return self


def losses(actions: list[Action]) -> list[tuple[str, str, str]]:
    return [
        (a.verdict.kind, a.verdict.scope, a.verdict.first.text)
        for a in actions
        if isinstance(a, RecordLoss)
    ]


def fault(scope: Scope = "worker", text: str = "boom", kind: str = "metal_hang") -> Fault:
    return Fault(kind, scope, Cause("RuntimeError", text))
