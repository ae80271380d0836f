"""Contents of a node's rosters, and when they are published."""

from __future__ import annotations

import itertools
from dataclasses import replace

from mayfly_protocol.codec import encode, rosters
from mayfly_protocol.counters import Memory
from mayfly_protocol.lifecycle import (
    Beat,
    Cause,
    Fault,
    Hello,
    Loading,
    ModelCard,
    Ready,
    ToReaper,
)
from mayfly_protocol.roster import ROSTER_INTERVAL_S, Loss, SlotView
from mayfly_reaper.crash_log import loss_for_roster
from mayfly_reaper.publish.roster import LOSSES_KEPT_S, MOVEMENT_S, RosterPublisher, slot_views
from mayfly_reaper.rules.actions import AnnounceLoss
from mayfly_reaper.rules.events import (
    MessageReceived,
    ProcessStarted,
    RecycleRequested,
    SpawnAllowed,
)
from mayfly_reaper.rules.slot import Slot, SlotRules
from mayfly_reaper.settings import Budgets

CARD = ModelCard(digest="d", rows=4)
VIEW = SlotView(slot="s", model="m", state="ready", incarnation=1)


def slot_after(*messages: ToReaper) -> Slot:
    """A slot at time 10 whose first worker was spawned at 0 and said these things."""
    rules = SlotRules(Budgets(), lambda: 0.0, itertools.count(1).__next__)
    slot, _ = rules.step(rules.begin("s", 0.0), SpawnAllowed(), 0.0)
    slot, _ = rules.step(slot, ProcessStarted(1, 4711), 0.0)
    for message in messages:
        slot, _ = rules.step(slot, MessageReceived(1, message), 10.0)
    return slot


def view(slot: Slot, model: str, now: float) -> SlotView:
    [shown] = slot_views(slot, model, now)
    return shown


def test_a_loading_slot_shows_how_far_it_is() -> None:
    slot = slot_after(Hello("s", 1, 4711), Loading("warming", 3, 9))
    assert view(slot, "m", 12.0) == SlotView(
        slot="s",
        model="m",
        state="loading",
        incarnation=1,
        pid=4711,
        phase="warming",
        load_done=3,
        load_total=9,
        age_s=12.0,
    )


def test_a_serving_slot_shows_where_it_is_and_what_it_does() -> None:
    beat = Beat(
        "decode",
        progress=9,
        running=2,
        waiting=3,
        waiting_tokens=4,
        inferences=5,
        generated_tokens=6,
        memory=Memory(footprint=7),
    )
    shown = view(slot_after(Ready("ipc:///w", CARD, "key"), beat), "m", 10.0)
    assert (shown.endpoint, shown.public_key, shown.card) == ("ipc:///w", "key", CARD)
    assert (shown.phase, shown.progress, shown.running, shown.waiting) == ("decode", 9, 2, 3)
    assert (shown.waiting_tokens, shown.inferences, shown.generated_tokens) == (4, 5, 6)
    assert shown.memory.footprint == 7


def test_a_slot_whose_worker_is_lost_says_why() -> None:
    fault = Fault("metal_hang", "worker", Cause("RuntimeError", "it hangs"))
    shown = view(slot_after(Ready("ipc:///w", CARD), fault), "m", 10.0)
    assert (shown.state, shown.detail) == ("gone", "metal_hang: it hangs")


def test_a_slot_in_backoff_says_when_it_goes_on() -> None:
    slot = replace(
        slot_after(), current=None, idle_state="backoff", retry_at=13.5, detail="unknown: x"
    )
    shown = view(slot, "m", 11.0)
    assert (shown.incarnation, shown.pid, shown.retry_in_s) == (1, 0, 2.5)
    assert shown.detail == "unknown: x"
    assert view(slot, "m", 14.0).retry_in_s == 0.0


def test_a_change_is_told_at_once_and_movement_soon() -> None:
    publisher = RosterPublisher("n", "e", 1, now=0.0)
    publisher.update_slot("s", (VIEW,), 0.0)
    assert publisher.due == 0.0
    first = publisher.next_roster(0.0)
    assert publisher.due == ROSTER_INTERVAL_S

    publisher.update_slot("s", (replace(VIEW, age_s=0.1),), 0.1)
    assert publisher.due == ROSTER_INTERVAL_S
    assert publisher.roster(0.1).revision == first.revision

    publisher.update_slot("s", (replace(VIEW, running=1),), 0.1)
    assert publisher.due == MOVEMENT_S
    publisher.update_slot("s", (replace(VIEW, running=1, state="draining"),), 0.2)
    assert publisher.due == 0.2
    second = publisher.next_roster(0.2)
    assert second.revision > first.revision
    assert second.slots[0].state == "draining"


def test_an_answer_does_not_put_the_next_roster_off() -> None:
    publisher = RosterPublisher("n", "e", 1, now=0.0)
    publisher.next_roster(0.0)
    publisher.roster(0.9)
    assert publisher.due == ROSTER_INTERVAL_S


def test_a_slot_whose_worker_is_being_replaced_has_two_views() -> None:
    rules = SlotRules(Budgets(), lambda: 0.0, itertools.count(2).__next__)
    slot = slot_after(Ready("ipc:///w", CARD), Beat("idle", 1))
    slot, _ = rules.step(slot, RecycleRequested(surge=True, reason="due"), 10.0)
    serving, loading = slot_views(slot, "m", 10.0)
    assert (serving.slot, serving.incarnation, serving.state) == ("s", 1, "ready")
    assert (loading.slot, loading.incarnation, loading.state) == ("s", 2, "spawning")
    publisher = RosterPublisher("n", "e", 1, now=0.0)
    publisher.update_slot("s", (serving, loading), 10.0)
    assert publisher.next_roster(10.0).slots == (serving, loading)
    publisher.update_slot("s", (loading,), 10.1)
    assert publisher.due == 10.1
    assert publisher.next_roster(10.1).slots == (loading,)


def test_losses_are_told_for_a_minute() -> None:
    fault = Fault("k", "worker", Cause("E", "first"), requests=("a", "b"), suspects=("a",))
    slot = slot_after(Ready("ipc:///w", CARD))
    rules = SlotRules(Budgets(), lambda: 0.0, itertools.count(2).__next__)
    _, [lost] = rules.step(slot, MessageReceived(1, fault), 10.0)
    assert isinstance(lost, AnnounceLoss)
    publisher = RosterPublisher("n", "e", 1, now=10.0)
    publisher.add_loss(loss_for_roster("s", lost.worker, lost.verdict, None), 10.0)
    told = publisher.next_roster(12.0)
    assert told.losses == (Loss("s", 1, "k", "worker", "first", age_s=2.0, suspects=("a",)),)
    assert rosters.decode(encode(told)) == told
    assert publisher.next_roster(10.0 + LOSSES_KEPT_S + 0.1).losses == ()
