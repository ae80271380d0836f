"""A node with real processes: workers that are recycled, that fail, that outlive their reaper."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mayfly_protocol.roster import Ask, DrainNode, Recycle, Roster
from support.cgroups import SmallCgroup
from support.node import RunningNode, fake_front_end, fake_worker, get
from support.processes import alive

pytestmark = pytest.mark.process

QUICK = {"retry_s": 0.1, "spacing_s": 0.0}


def rosters_until(node: RunningNode, incarnation: int) -> list[Roster]:
    """Returns all rosters until a worker with this number serves alone."""
    seen: list[Roster] = []

    def wanted(roster: Roster) -> bool:
        seen.append(roster)
        states = [(slot.state, slot.incarnation >= incarnation) for slot in roster.slots]
        return states == [("ready", True)]

    node.roster(wanted)
    return seen


def test_a_worker_that_is_due_serves_until_its_successor_does(tmp_path: Path) -> None:
    with RunningNode(tmp_path, budgets=QUICK, lifetime={"max_inferences": 3}) as node:
        node.ready()
        seen = rosters_until(node, 4)
        started = [[s.state for s in roster.slots] for roster in seen]
        assert all(states.count("ready") == 1 for states in started)
        assert all(len({s.slot for s in roster.slots}) == 1 for roster in seen)
        assert any(len(states) == 2 for states in started)
        assert not any(roster.losses for roster in seen)
        node.wait_for_note("worker 1 of slot fake-model-0 is replaced (recycle due: ")
    assert not (tmp_path / "autopsies.jsonl").exists()


def test_without_room_for_two_a_due_worker_is_replaced_in_its_place(tmp_path: Path) -> None:
    worker = fake_worker("--footprint", str(10**15))
    with RunningNode(tmp_path, worker, budgets=QUICK, lifetime={"max_inferences": 3}) as node:
        node.ready()
        seen = rosters_until(node, 3)
        assert all(len(roster.slots) == 1 for roster in seen)
        assert "draining" in {roster.slots[0].state for roster in seen}
    assert not (tmp_path / "autopsies.jsonl").exists()


def test_a_pool_is_recycled_one_by_one(tmp_path: Path) -> None:
    worker = fake_worker("--footprint", str(10**15))
    with RunningNode(tmp_path, worker, workers=3, budgets=QUICK) as node:
        node.roster(lambda r: [s.memory.footprint for s in r.slots] == [10**15] * 3)
        assert node.ask(Recycle()).ok
        seen: list[Roster] = []

        def wanted(roster: Roster) -> bool:
            seen.append(roster)
            return all(s.state == "ready" and s.incarnation > 3 for s in roster.slots)

        node.roster(wanted)
        assert min(sum(s.state == "ready" for s in r.slots) for r in seen) == 2


def test_the_requests_of_the_pass_that_died_are_told_and_written_down(tmp_path: Path) -> None:
    with RunningNode(tmp_path, fake_worker("--behave", "crash"), budgets=QUICK) as node:
        (loss,) = node.roster(lambda roster: bool(roster.losses)).losses
        assert (loss.kind, loss.suspects, loss.marked) == ("crashed", ("new",), ("old",))
        node.ready(2)
        (autopsy,) = node.autopsies()
        files = {path.suffix for path in node.runtime.folder.iterdir()}
    assert autopsy["breadcrumb"] == {
        "phase": "decode",
        "step": 5,
        "requests": ["new", "old"],
        "young": ["new"],
    }
    assert (autopsy["suspects"], autopsy["marked"]) == (["new"], ["old"])
    assert files == {".ipc"}


def test_a_loss_is_told_at_the_verdict_and_not_at_the_exit(tmp_path: Path) -> None:
    budgets = {**QUICK, "decode_s": 0.3, "first_factor": 1.0, "stacks_s": 60.0}
    with RunningNode(tmp_path, fake_worker("--behave", "hang"), budgets=budgets) as node:
        first = node.ready()
        (loss,) = node.roster(lambda roster: bool(roster.losses)).losses
        assert loss.kind == "wedged"
        assert alive(psutil.Process(first.pid))
        assert not (tmp_path / "autopsies.jsonl").exists()
        os.kill(first.pid, signal.SIGKILL)
        node.ready(2)
        roster = node.roster(lambda roster: True)
        assert [loss.kind for loss in roster.losses] == ["wedged"]


def test_a_second_batch_fault_recycles_a_worker(tmp_path: Path) -> None:
    with RunningNode(tmp_path, fake_worker("--behave", "batch-faults"), budgets=QUICK) as node:
        node.ready(2)
        node.wait_for_note(
            "fake-model-0 survived the batch fault allocation_failed: [malloc] Unable"
        )
    assert not (tmp_path / "autopsies.jsonl").exists()


def test_a_worker_after_losses_in_a_row_is_on_trial(tmp_path: Path) -> None:
    busy = tmp_path / "busy"
    busy.touch()
    worker = fake_worker("--behave", "fault", "--times", "2", "--busy", str(busy))
    budgets = {**QUICK, "trial_inferences": 3}
    with RunningNode(tmp_path, worker, budgets=budgets, last_words_s=5.0) as node:
        assert node.ready(3).trial
        busy.unlink()
        held = node.slot(lambda view: view.incarnation == 3 and not view.trial)
        assert (held.state, held.inferences >= 3) == ("ready", True)


def test_a_new_reaper_waits_for_the_workers_of_the_old_one(tmp_path: Path) -> None:
    busy = tmp_path / "busy"
    busy.touch()
    with RunningNode(tmp_path, fake_worker("--busy", str(busy))) as old:
        orphan = psutil.Process(old.ready().pid)
        old.process.kill()
        old.process.wait()
        with RunningNode(tmp_path) as new:
            waiting = new.slot(lambda view: view.state == "backoff")
            assert waiting.detail == (
                f"waits for the worker of an earlier reaper to leave (pid {orphan.pid})"
            )
            assert alive(orphan)
            busy.unlink()
            spawned = new.slot(lambda view: view.state in ("spawning", "loading", "ready"))
            assert spawned.incarnation == 2
            assert not alive(orphan)
            new.ready(2)


def test_an_orphan_that_overstays_is_killed(tmp_path: Path) -> None:
    busy = tmp_path / "busy"
    busy.touch()
    with RunningNode(tmp_path, fake_worker("--busy", str(busy))) as old:
        orphan = psutil.Process(old.ready().pid)
        old.process.kill()
        old.process.wait()
        with RunningNode(tmp_path, budgets={"orphans_s": 0.5}) as new:
            new.ready(2)
            assert not alive(orphan)


def test_a_drain_lets_the_workers_finish_before_the_front_end_goes(tmp_path: Path) -> None:
    worker = fake_worker("--behave", "deaf")
    budgets = {"leave_s": 0.1, "terminate_s": 0.1, "stacks_s": 0.1}
    with RunningNode(tmp_path, worker, front_end=fake_front_end(), budgets=budgets) as node:
        node.ready()
        _, host, port = node.wait_for("front")
        assert node.ask(DrainNode(grace_s=3.0)).ok
        node.slot(lambda view: view.state == "draining")
        assert get(f"http://{host}:{port}")
        assert node.process.wait(20) == 0
        assert node.children() == []


def test_a_front_end_that_keeps_ending_is_said_to(tmp_path: Path) -> None:
    with RunningNode(tmp_path, front_end=["false"], budgets=QUICK) as node:
        node.ready()
        third = "the front end ended: exit status 1, 3 times in a row; a new one starts in 0."
        node.wait_for_note(third)


def test_a_worker_that_eats_all_memory_is_the_systems_to_kill(
    tmp_path: Path, small_cgroup: SmallCgroup
) -> None:
    moved = tmp_path / "moved"
    worker = fake_worker("--behave", "eat", "--once", str(moved))
    with RunningNode(tmp_path, worker, budgets={"spacing_s": 0.0, "retry_s": 4.0}) as node:
        first = node.ready()
        small_cgroup.take(node.process.pid, first.pid, limit=300 << 20)
        # The node counts there from a roster on, and has counted when the next one comes.
        before = node.ask(Ask()).revision
        node.roster(lambda roster: roster.revision > before + 1)
        moved.touch()
        waiting = node.slot(lambda view: view.state == "backoff")
        assert waiting.retry_in_s is not None
        assert waiting.retry_in_s > 1
        (autopsy,) = node.autopsies()
        assert (autopsy["kind"], autopsy["scope"]) == ("killed_by_system", "machine")
        assert "out-of-memory kills went from 0 to 1" in autopsy["first_cause"]["text"]
        assert "with at most 0.0 GB" in autopsy["done"]
        node.ready(2)


@pytest.mark.skipif(sys.platform != "linux", reason="sets another process's limits")
def test_a_full_disk_costs_records_and_nothing_else(tmp_path: Path) -> None:
    """No file of the node's can grow any more: the same as a full disk, but for the number."""
    with RunningNode(tmp_path, budgets=QUICK) as node:
        first = node.ready()
        psutil.Process(node.process.pid).rlimit(psutil.RLIMIT_FSIZE, (0, 0))
        for incarnation in (1, 2, 3):
            os.kill(node.ready(incarnation).pid, signal.SIGKILL)
        last = node.ready(4)
        assert last.pid != first.pid
        node.process.terminate()
        assert node.process.wait(20) == 0
        notes = [words[1] for words in node.all_events() if words[0] == "note"]
        assert sum("records of lost workers cannot be written" in note for note in notes) == 1
        assert sum("the list of workers cannot be written" in note for note in notes) == 1
        assert sum("was lost: " in note for note in notes) == 3


@pytest.mark.parametrize(
    "recycles", [20, pytest.param(500, marks=[pytest.mark.long, pytest.mark.timeout(900)])]
)
def test_forced_recycles_leave_nothing_behind(
    tmp_path: Path, recycles: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunningNode(tmp_path, workers=2, budgets=QUICK, lifetime={"max_inferences": 1}) as node:
        reaper = psutil.Process(node.process.pid)
        seen: list[Roster] = []

        def recycled(times: int) -> Callable[[Roster], bool]:
            def wanted(roster: Roster) -> bool:
                seen.append(roster)
                return max(slot.incarnation for slot in roster.slots) >= 2 + times

            return wanted

        node.roster(recycled(recycles // 2), patience_s=800)
        settled, middle = len(seen), (reaper.num_fds(), reaper.memory_info().rss)
        node.roster(recycled(recycles), patience_s=800)
        end = (reaper.num_fds(), reaper.memory_info().rss)
        for roster in seen[settled:]:
            serving = {slot.slot for slot in roster.slots if slot.state == "ready"}
            assert serving == {"fake-model-0", "fake-model-1"}
            assert roster.losses == ()
        assert node.ask(DrainNode(5.0)).ok
        assert node.process.wait(10) == 0
        assert not node.runtime.folder.exists()
        assert not list((tmp_path / "stderr").iterdir())
    with capsys.disabled():
        print(f"\nreaper after {recycles // 2} and {recycles} recycles: {middle}, {end} (fds, RSS)")
    assert end[0] <= middle[0] + 6  # the pipes of those that are being replaced just now
    assert end[1] <= middle[1] + (4 << 20)
