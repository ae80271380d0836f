"""A slot's events, one after the other: for tests of its rules, without a process or a clock."""

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
from mayfly_reaper.rules.events import Event, Exited, Granted, Said, Started, Tick
from mayfly_reaper.rules.incarnation import Action, Lose, Record, Spawn
from mayfly_reaper.rules.slot import Slot, SlotRules
from mayfly_reaper.rules.worker import LAST_WORDS_S
from mayfly_reaper.settings import Budgets

BUDGETS = Budgets()
IDLE = Beat(phase="idle", progress=0)
READY = Ready("ipc:///w1", ModelCard(digest="d"))


class Story:
    """Tells a slot's events and remembers what it asked for. Jitter is at its least."""

    def __init__(self, budgets: Budgets = BUDGETS) -> None:
        self.budgets = budgets
        self.rules = SlotRules(budgets, lambda: 0.0, itertools.count(1).__next__)
        self.now = 100.0
        self.lost: list[Lose] = []
        self.slot: Slot = self.rules.begin("s", self.now)

    def tell(self, event: Event) -> list[Action]:
        """What it asks for, without the announcements of losses: those are kept apart. A worker
        that it wants at once is granted, as the node does."""
        self.slot, actions = self.rules.step(self.slot, event, self.now)
        if self.rules.wants_worker(self.slot, self.now):
            self.slot, more = self.rules.step(self.slot, Granted(), self.now)
            actions += more
        self.lost += [action for action in actions if isinstance(action, Lose)]
        return [action for action in actions if not isinstance(action, Lose)]

    def say(self, message: ToReaper, incarnation: int | None = None) -> list[Action]:
        return self.tell(Said(incarnation or self.slot.incarnation, message))

    def exit(self, status: int, stderr: str = "") -> list[Action]:
        """An exit, and the end of the wait for last words."""
        actions = self.tell(Exited(self.slot.incarnation, status, stderr))
        return actions + self.wait(LAST_WORDS_S)

    def wait(self, seconds: float, beat: Beat | None = None) -> list[Action]:
        """Time passes in ticks, each after a beat of every worker if there is one."""
        actions = []
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            if beat is not None:
                for _, life in self.slot.lives:
                    actions += self.say(beat, life.number)
            actions += self.tell(Tick())
        return actions

    def start(self) -> Story:
        assert self.tell(Tick()) == [Spawn(self.slot.incarnation)]
        self.tell(Started(self.slot.incarnation, 4711))
        return self

    def ready(self, ready: Ready = READY) -> Story:
        if self.slot.life is None:
            self.start()
        self.say(Hello("s", self.slot.incarnation, 4711))
        self.say(ready)
        self.say(IDLE)
        assert self.slot.state == "ready"
        return self

    def steady(self) -> Story:
        self.ready().wait(self.budgets.steady_s, beat=IDLE)
        return self


def losses(actions: list[Action]) -> list[tuple[str, str, str]]:
    return [
        (a.verdict.kind, a.verdict.scope, a.verdict.first.text)
        for a in actions
        if isinstance(a, Record)
    ]


def fault(scope: Scope = "worker", text: str = "boom", kind: str = "metal_hang") -> Fault:
    return Fault(kind, scope, Cause("RuntimeError", text))
