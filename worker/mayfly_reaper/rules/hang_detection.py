"""Hang detection: decides that a worker hangs, because it sends no messages or makes no progress.

A worker is *silent* if it sends nothing, and *wedged* if its messages show no progress. Each state
and phase of a worker has its own time limit, from :class:`mayfly_reaper.settings.Budgets`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from mayfly_protocol.lifecycle import Beat, Cause, Loading, WorkPhase
from mayfly_protocol.roster import SlotState
from mayfly_reaper.rules.exit_cause import Verdict
from mayfly_reaper.rules.incarnation import STARTING, Incarnation
from mayfly_reaper.settings import Budgets


@dataclass(frozen=True, slots=True)
class HangDeadline:
    """The time at which a worker counts as lost, unless a message or progress of the worker comes
    first."""

    at: float
    kind: Literal["silent", "wedged"]
    text: str

    def verdict(self) -> Verdict:
        return Verdict(self.kind, "worker", Cause("Budget", self.text))


def hang_deadline(worker: Incarnation, budgets: Budgets) -> HangDeadline:
    """Returns the earlier of a worker's two deadlines: for its next message and for its next
    progress."""
    silence_s, missing = _silence_limit(worker.state, budgets)
    silent = HangDeadline(
        worker.last_message_at + silence_s, "silent", f"{missing} for {silence_s:g} s"
    )
    stillness_s, missing = _stillness_limit(worker, budgets)
    wedged = HangDeadline(
        worker.last_progress_at + stillness_s, "wedged", f"{missing} for {stillness_s:g} s"
    )
    return silent if silent.at <= wedged.at else wedged


def with_loading(worker: Incarnation, loading: Loading, now: float) -> Incarnation:
    """Returns the worker after a report of its loading. Only a report that differs from the last
    one counts as progress."""
    moved = loading != worker.loading
    return replace(
        worker, loading=loading, last_progress_at=now if moved else worker.last_progress_at
    )


def with_beat(worker: Incarnation, beat: Beat, now: float) -> Incarnation:
    """Returns the worker after a heartbeat. The heartbeat is progress if its phase or its progress
    counter differs from the last heartbeat's, or if the worker has nothing to do."""
    last = worker.beat
    footprint = beat.memory.footprint
    worker = replace(worker, peak_footprint=max(worker.peak_footprint, footprint))
    if worker.ready is not None and last is None:
        worker = replace(worker, footprint_when_ready=footprint)
    if last is None:
        return replace(worker, beat=beat, last_progress_at=now)
    moved = not _busy(beat) or (beat.phase, beat.progress) != (last.phase, last.progress)
    return replace(
        worker,
        beat=beat,
        phases_stepped=worker.phases_stepped | _phases_stepped(last, beat),
        last_progress_at=now if moved else worker.last_progress_at,
    )


def _phases_stepped(last: Beat, beat: Beat) -> set[WorkPhase]:
    """Returns the phases (such as prefill or decode) in which an engine step has ended between two
    heartbeats. The counters of steps are compared, too, since chunks of short prompts may begin and
    end between two heartbeats."""
    stepped: set[WorkPhase] = {last.phase} if beat.progress > last.progress else set()
    if beat.prefill_s.count > last.prefill_s.count:
        stepped.add("prefill")
    if beat.decode_s.count > last.decode_s.count:
        stepped.add("decode")
    return stepped


def _busy(beat: Beat) -> bool:
    # An idle engine beside requests that wait for the engine is a sign of a hang. Requests that are
    # still being tokenized are not the engine's: to tokenize a long prompt may take a minute.
    return beat.phase != "idle" or beat.running > 0 or beat.waiting > beat.preparing


def _silence_limit(state: SlotState, budgets: Budgets) -> tuple[float, str]:
    if state == "spawning":
        return budgets.hello_s, "no message since it was started"
    if state in STARTING:
        return budgets.load_silent_s, "no message while loading"
    return budgets.silent_s, "no heartbeat"


def _stillness_limit(worker: Incarnation, budgets: Budgets) -> tuple[float, str]:
    if worker.state == "spawning":
        return float("inf"), "starting"
    if worker.state in STARTING:
        phase = worker.loading.phase if worker.loading is not None else "starting"
        return budgets.load_still_s, f"no progress while {phase}"
    beat = worker.beat
    if beat is None or not _busy(beat):
        return float("inf"), "idle"
    if beat.phase == "stopping":
        return float("inf"), "stopping"  # the kill escalation has its own times
    step_s = budgets.decode_s if beat.phase == "decode" else budgets.prefill_s
    if beat.phase not in worker.phases_stepped:
        step_s *= budgets.first_factor
    return (
        step_s,
        f"no progress in {beat.phase} ({beat.running} running, {beat.waiting} waiting)",
    )
