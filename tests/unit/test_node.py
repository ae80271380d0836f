"""A node with real processes: its workers speak the protocol and have no MLX."""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from mayfly_protocol.roster import Ask, Done, Recycle, Roster
from mayfly_reaper.settings import WORKER_COMMAND
from support.node import RunningNode, fake_front_end, fake_worker, get

pytestmark = pytest.mark.process

QUICK = {"retry_s": 0.1, "spacing_s": 0.0}


@pytest.fixture(scope="module")
def quiet_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    """A node with one worker, for tests that leave it as it is."""
    with RunningNode(tmp_path_factory.mktemp("quiet"), preload_blas=True) as node:
        node.ready()
        yield node


def test_a_worker_becomes_ready_and_a_stop_leaves_nothing(tmp_path: Path) -> None:
    budgets = {"stop_s": 60.0, "leave_s": 60.0}  # nobody has to be waited for
    with RunningNode(tmp_path, workers=2, front_end=fake_front_end(), budgets=budgets) as node:
        roster = node.roster(lambda roster: [s.state for s in roster.slots] == ["ready"] * 2)
        assert [slot.slot for slot in roster.slots] == ["fake-model-0", "fake-model-1"]
        assert {slot.incarnation for slot in roster.slots} == {1, 2}
        assert all(slot.endpoint.startswith("ipc:///tmp/mayfly-") for slot in roster.slots)
        assert roster.pid == node.process.pid
        node.wait_for("front", "127.0.0.1")
        assert node.runtime.folder.stat().st_mode & 0o777 == 0o700
        children = node.children()
        assert len(children) == 3

        node.process.send_signal(signal.SIGTERM)
        assert node.process.wait(20) == 0
        assert not any(child.is_running() for child in children)
        assert not node.runtime.folder.exists()
        assert not list((tmp_path / "stderr").iterdir())
        assert not (tmp_path / "autopsies.jsonl").exists()


def test_a_killed_worker_is_replaced_and_missed_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    delays: list[float] = []

    def quick() -> bool:
        return statistics.median(delays[-5:]) < 0.05

    with RunningNode(tmp_path, budgets=QUICK) as node:
        first = node.ready()
        reaper = psutil.Process(node.process.pid)
        files = reaper.num_fds()
        old = first
        # The machine may be busy for the while that five take, but hardly three times in a row.
        while len(delays) % 5 or not delays or (len(delays) < 15 and not quick()):
            os.kill(old.pid, signal.SIGKILL)
            killed_at = time.monotonic()
            node.slot(lambda view: view.state != "ready")
            delays.append(time.monotonic() - killed_at)
            old = node.ready(old.incarnation + 1)
            assert not Path(first.endpoint.removeprefix("ipc://")).exists()
        roster = node.ask(Ask())
        assert isinstance(roster, Roster)
        assert roster.pid == reaper.pid
        assert reaper.num_fds() <= files + 1  # the asker's connection
        assert [loss.kind for loss in roster.losses] == ["killed"] * len(delays)
        autopsy = node.autopsies()[0]
    assert (autopsy["kind"], autopsy["exit_status"], autopsy["state"]) == ("killed", -9, "ready")
    assert autopsy["pid"] == first.pid
    assert autopsy["done"] == "a new worker starts at once"
    with capsys.disabled():
        median_ms = statistics.median(delays[-5:]) * 1000
        print(f"\nSIGKILL to roster, median of 5: {median_ms:.1f} ms")
    assert quick()


def test_a_fault_is_known_by_its_first_cause(tmp_path: Path) -> None:
    worker = fake_worker("--behave", "fault")
    with RunningNode(tmp_path, worker, budgets=QUICK, last_words_s=5.0) as node:
        node.ready(2)
        (autopsy,) = node.autopsies()
    assert (autopsy["kind"], autopsy["scope"]) == ("metal_timeout", "worker")
    assert autopsy["first_cause"]["text"] == "[METAL] the first"
    assert [cause["text"] for cause in autopsy["later"]] == ["cleanup"]
    assert autopsy["requests"] == ["r1", "r2"]
    assert autopsy["exit_status"] == 70


def test_what_an_aborting_worker_printed_is_in_its_autopsy(tmp_path: Path) -> None:
    with RunningNode(tmp_path, fake_worker("--behave", "abort"), budgets=QUICK) as node:
        node.ready(2)
        (autopsy,) = node.autopsies()
        node.wait_for_note("Caused GPU Timeout")
    assert (autopsy["kind"], autopsy["exit_status"]) == ("metal_timeout", -signal.SIGABRT)
    assert "Caused GPU Timeout Error" in autopsy["first_cause"]["text"]
    assert any("terminate called" in line for line in autopsy["stderr"])


def test_a_configuration_that_cannot_work_is_not_tried_again(tmp_path: Path) -> None:
    worker = fake_worker("--behave", "configuration")
    with RunningNode(tmp_path, worker, last_words_s=5.0) as node:
        failed = node.slot(lambda view: view.state == "failed")
        assert "gpt-17" in failed.detail
        assert node.ask(Recycle("fake-model-0")) == Done(True, "recycling fake-model-0")
        assert node.ready().incarnation == 2


def test_a_load_that_fails_backs_off(tmp_path: Path) -> None:
    worker = fake_worker("--behave", "load-failed")
    budgets = {**QUICK, "retry_s": 1.0}
    with RunningNode(tmp_path, worker, budgets=budgets, last_words_s=5.0) as node:
        # What the observer is told, since who subscribes late misses a roster.
        *_, detail, retry_in_s = node.wait_for("slot", "fake-model-0", "backoff", 1)
        assert 0 <= retry_in_s <= 1.0
        assert "cut short" in detail
        node.ready(2)


def test_a_worker_without_progress_is_replaced_with_its_stacks_kept(tmp_path: Path) -> None:
    budgets = {**QUICK, "decode_s": 0.4, "first_factor": 1.0, "stacks_s": 2.5, "terminate_s": 10}
    with RunningNode(tmp_path, fake_worker("--behave", "hang"), budgets=budgets) as node:
        first = node.ready()
        gone = node.slot(lambda view: view.state == "gone")
        assert (gone.incarnation, gone.pid) == (1, first.pid)
        assert "no progress in decode (1 running" in gone.detail
        node.ready(2)
        (autopsy,) = node.autopsies()
    assert autopsy["kind"] == "wedged"
    assert any("serve_until" in line for line in autopsy["stderr"])


def test_a_stopped_worker_is_silent_and_killed(tmp_path: Path) -> None:
    budgets = {**QUICK, "silent_s": 0.5}
    with RunningNode(
        tmp_path, fake_worker("--behave", "stop", "--after", "0.3"), budgets=budgets
    ) as node:
        node.ready(2)
        (autopsy,) = node.autopsies()
    assert (autopsy["kind"], autopsy["exit_status"]) == ("silent", -9)


def test_a_load_that_stands_still_is_ended(tmp_path: Path) -> None:
    budgets = {**QUICK, "load_still_s": 1.5, "stacks_s": 0.1, "terminate_s": 0.2}
    with RunningNode(tmp_path, fake_worker("--behave", "load-for-ever"), budgets=budgets) as node:
        node.ready(2)
        (autopsy,) = node.autopsies()
    assert (autopsy["kind"], autopsy["state"]) == ("wedged", "loading")


def test_a_load_that_takes_long_is_left_alone(tmp_path: Path) -> None:
    budgets = {"load_still_s": 2.8}
    began = time.monotonic()
    with RunningNode(tmp_path, fake_worker("--behave", "load-slowly"), budgets=budgets) as node:
        loading = node.slot(lambda view: view.state == "loading")
        view = node.ready()
        assert time.monotonic() - began > 2 * budgets["load_still_s"]
        assert (view.incarnation, view.pid) == (loading.incarnation, loading.pid)


def test_a_worker_that_recycles_itself_is_no_loss(tmp_path: Path) -> None:
    worker = fake_worker("--behave", "recycle", "--times", "2")
    with RunningNode(tmp_path, worker, budgets=QUICK) as node:
        node.ready(3)
        roster = node.ask(Recycle(""))
        assert roster.ok
        node.ready(4)
        assert not (tmp_path / "autopsies.jsonl").exists()


def test_a_second_signal_hurries(tmp_path: Path) -> None:
    worker = fake_worker("--behave", "deaf")
    with RunningNode(tmp_path, worker, budgets={"stop_s": 60.0}) as node:
        node.ready()
        node.process.send_signal(signal.SIGINT)
        node.slot(lambda view: view.state == "draining")
        node.process.send_signal(signal.SIGHUP)
        assert node.process.wait(20) == 0
        assert node.children() == []


def test_a_deaf_worker_does_not_keep_a_node_from_stopping(tmp_path: Path) -> None:
    budgets = {"stop_s": 0.2, "leave_s": 0.2, "terminate_s": 0.2, "stacks_s": 0.2}
    with RunningNode(tmp_path, fake_worker("--behave", "deaf"), budgets=budgets) as node:
        node.ready()
        node.process.send_signal(signal.SIGTERM)
        assert node.process.wait(5) == 0
        (autopsy,) = node.autopsies()
    assert autopsy["first_cause"]["text"] == "did not leave in the time that it was given"


def test_a_stop_while_loading_leaves_nothing(tmp_path: Path) -> None:
    with RunningNode(tmp_path, fake_worker("--behave", "load-for-ever")) as node:
        node.slot(lambda view: view.state == "loading")
        children = node.children()
        node.process.send_signal(signal.SIGINT)
        assert node.process.wait(5) == 0
        assert not any(child.is_running() for child in children)
        assert not (tmp_path / "autopsies.jsonl").exists()


def test_a_killed_node_takes_everything_with_it_and_its_successor_cleans_up(
    tmp_path: Path,
) -> None:
    with RunningNode(tmp_path, front_end=fake_front_end()) as node:
        node.ready()
        children = node.children()
        assert len(children) == 2
        node.process.kill()
        node.process.wait()
        _, alive = psutil.wait_procs(children, timeout=5)
        assert not alive
        left = sorted(path.name for path in node.runtime.folder.iterdir())
        assert "node.ipc" in left
    with RunningNode(tmp_path) as node:
        assert node.ready().incarnation == 2
        assert len(list(node.runtime.folder.iterdir())) == 3
        node.process.terminate()
        assert node.process.wait(5) == 0
        assert not node.runtime.folder.exists()


def test_one_state_directory_has_one_node(quiet_node: RunningNode) -> None:
    with RunningNode(quiet_node.state_dir) as second:
        complaint = second.refusal()
    pid = quiet_node.process.pid
    assert f"another mayfly serves from this state directory (pid {pid})" in complaint
    assert quiet_node.ask(Ask()).pid == pid


def test_a_taken_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with RunningNode(tmp_path, front_end=fake_front_end(), port=port) as node:
            complaint = node.refusal()
    assert f"cannot listen on 127.0.0.1 port {port}" in complaint
    assert not node.runtime.folder.exists()


def test_a_front_end_that_crashes_refuses_nobody(tmp_path: Path) -> None:
    with RunningNode(tmp_path, front_end=fake_front_end(), budgets=QUICK) as node:
        _, host, port = node.wait_for("front")
        url = f"http://{host}:{port}"
        first = get(url)
        with pytest.raises(OSError):
            get(f"{url}/crash")
        second = get(url)
        assert second != first
        crashed = node.wait_for(
            "note", "the front end ended: exit status 9; a new one starts at once"
        )
        assert crashed
        with pytest.raises(OSError):
            get(f"{url}/crash")
        assert get(url) not in (first, second)
        assert [words for words in node.events() if words[0] == "front"] == [["front", host, port]]


def test_a_late_subscriber_hears_the_roster_at_once(quiet_node: RunningNode) -> None:
    context = zmq.Context()
    took: list[float] = []
    # Whoever is not told at once waits a second each time; one or the other may be kept waiting
    # by the machine.
    while sum(each < 0.5 for each in took) < 3:
        assert len(took) < 9, took
        quiet_node.roster(lambda roster: True)  # just now: the next regular one is a second away
        with context.socket(zmq.SUB) as late:
            late.linger = 0
            late.subscribe(b"roster")
            began = time.monotonic()
            late.connect(quiet_node.runtime.roster)
            assert late.poll(5000)
            took.append(time.monotonic() - began)
    context.term()


def test_a_terminal_that_is_closed_ends_nothing(tmp_path: Path) -> None:
    with RunningNode(tmp_path, budgets=QUICK, audience=False) as node:
        first = node.ready()
        os.kill(first.pid, signal.SIGKILL)
        node.ready(2)
        node.process.send_signal(signal.SIGHUP)
        assert node.process.wait(5) == 0
        assert node.children() == []


def test_nonsense_on_the_control_socket_changes_nothing(quiet_node: RunningNode) -> None:
    before = quiet_node.ask(Ask())
    context = zmq.Context()
    for identity in (b"anyone", b"fake-model-0#99", b"fake-model-0#x"):
        with context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.ROUTING_ID, identity)
            socket.connect(quiet_node.runtime.control)
            socket.send(b"\xc1")
            socket.send_multipart([b"", b"two frames"])
    context.term()
    after = quiet_node.ask(Ask())
    assert (after.epoch, after.slots[0].pid) == (before.epoch, before.slots[0].pid)
    assert quiet_node.ask(Recycle("nobody")) == Done(
        False, "there is no slot 'nobody' here, but fake-model-0"
    )


def test_an_idle_node_sleeps_and_its_worker_has_its_limits(quiet_node: RunningNode) -> None:
    worker = psutil.Process(quiet_node.ask(Ask()).slots[0].pid)
    process = psutil.Process(quiet_node.process.pid)
    before = sum(process.cpu_times()[:2])
    began = time.monotonic()
    quiet_node.roster(lambda roster: time.monotonic() - began > 1.0)
    used = sum(process.cpu_times()[:2]) - before
    assert used / (time.monotonic() - began) < 0.1, "of one core"
    assert worker.environ()["MLX_ENABLE_CACHE_THRASHING_CHECK"] == "0"
    if sys.platform == "linux":
        assert worker.rlimit(psutil.RLIMIT_CORE)[0] == 0
        soft, hard = worker.rlimit(psutil.RLIMIT_NOFILE)
        assert soft >= min(65536, hard)


def test_nothing_of_a_reaper_imports_mlx() -> None:
    check = (
        "import mayfly_reaper.node, sys; assert not any(m.startswith('mlx') for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
    assert WORKER_COMMAND[0] == sys.executable
