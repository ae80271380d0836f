"""Memory of the machine, evidence of out-of-memory kills, and the spawn gate."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mayfly_reaper.machine import cgroups, memory
from mayfly_reaper.machine.caffeinate import awake, command
from mayfly_reaper.machine.memory import MachineMemory, parse_vm_stat
from mayfly_reaper.machine.oom import OomWatch, jetsam_report
from mayfly_reaper.machine.spawn_gate import ENOUGH, SpawnGate
from mayfly_reaper.rules.slot import Slot
from mayfly_reaper.settings import Budgets
from support.cgroups import SmallCgroup

BUDGETS = Budgets()
GB = 10**9


class SpawnGateHarness:
    """A spawn gate on a machine whose memory a test sets."""

    def __init__(self, available: int, wired: int | None = None) -> None:
        self.memory = MachineMemory(available * GB, wired and wired * GB)
        self.gate = SpawnGate(BUDGETS, lambda: self.memory, lambda: 0.0)

    def deferral(
        self, now: float, slot: Slot, *, in_use: int = 0, promised: int = 0
    ) -> tuple[float, str] | None:
        found = self.gate.deferral(slot, now, in_use=in_use * GB, promised=promised * GB)
        return (found.until - now, found.reason) if found is not None else None

    def becomes(self, available: int, wired: int | None = None) -> None:
        self.memory = MachineMemory(available * GB, wired and wired * GB)


def slot(needs: int, name: str = "s", memory_freed_at: float = 0.0) -> Slot:
    return Slot(name, 0.0, memory_needed=needs * GB, memory_freed_at=memory_freed_at)


# -- a fault of the machine ------------------------------------------------------------------


def test_a_fault_of_the_machine_holds_every_slot_and_longer_each_time() -> None:
    machine = SpawnGateHarness(100)
    pauses = []
    now = 0.0
    for _ in range(12):
        until = machine.gate.pause_after_fault("killed_by_system: x", now)
        pauses.append(until - now)
        for name in ("a", "b"):
            held = machine.deferral(now, slot(0, name))
            reason = "spawns are paused after a fault of the machine: killed_by_system: x"
            assert held == (until - now, reason)
        now = until
        assert machine.deferral(now, slot(0)) is None
    assert pauses[:3] == pytest.approx([0.5, 1.0, 2.0])
    assert pauses[-1] == pytest.approx(BUDGETS.retry_max_s / 2)
    now += BUDGETS.retry_max_s + 1
    assert machine.gate.pause_after_fault("again", now) - now == pytest.approx(0.5)


# -- memory that comes back, and memory that does not --------------------------------------------


def test_a_first_worker_waits_for_nothing() -> None:
    assert SpawnGateHarness(0).deferral(0.0, slot(0)) is None


def test_a_worker_waits_until_the_last_ones_memory_is_back() -> None:
    machine = SpawnGateHarness(50)
    machine.becomes(10)
    held = machine.deferral(0.1, slot(40))
    assert held == (
        0.5,
        "waits for the last worker's memory: 10.0 GB are free, 40.0 GB are needed",
    )
    machine.becomes(int(40 * ENOUGH))
    assert machine.deferral(0.7, slot(40)) is None


def test_memory_that_never_was_there_is_not_waited_for() -> None:
    """A worker that needs more than was free when the last one was started never came up."""
    machine = SpawnGateHarness(30)
    assert machine.deferral(0.0, slot(0)) is None
    machine.becomes(28)
    assert machine.deferral(1.0, slot(40)) is None


def test_what_others_that_load_will_take_is_not_free() -> None:
    machine = SpawnGateHarness(50)
    assert machine.deferral(0.0, slot(40), promised=10) is None
    assert machine.deferral(0.0, slot(40, "t"), promised=20) is not None


def test_memory_that_does_not_return_is_told_and_others_programs_are_outwaited() -> None:
    machine = SpawnGateHarness(50)
    machine.becomes(10)
    held = machine.deferral(BUDGETS.memory_return_s, slot(40))
    assert held is not None
    assert held[0] == 5.0
    assert held[1].startswith("the last worker's memory did not return: 10.0 GB are free")
    assert held[1].endswith("a reboot may be needed")
    assert machine.deferral(BUDGETS.retry_max_s - 1, slot(40)) is not None
    assert machine.deferral(BUDGETS.retry_max_s, slot(40)) is None


def test_wired_memory_that_was_stranded_is_not_outwaited() -> None:
    machine = SpawnGateHarness(50, wired=4)
    machine.becomes(10, wired=44)
    assert machine.deferral(BUDGETS.retry_max_s * 100, slot(40)) is not None
    machine.becomes(40, wired=14)
    assert machine.deferral(BUDGETS.retry_max_s * 100 + 1, slot(40)) is None


def test_what_living_workers_have_wired_is_not_stranded() -> None:
    machine = SpawnGateHarness(90, wired=4)
    machine.becomes(10, wired=44)
    assert machine.deferral(BUDGETS.retry_max_s, slot(40), in_use=40) is None


# -- macOS -----------------------------------------------------------------------------------

VM_STAT = """\
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10000.
Pages active:                            524000.
Pages inactive:                           20000.
Pages speculative:                         3000.
Pages throttled:                              0.
Pages wired down:                        150000.
Pages purgeable:                           4000.
"Translation faults":                 412345678.
Pages copy-on-write:                   12345678.
Pages stored in compressor:              100000.
Pages occupied by compressor:             40000.
"""


def test_vm_stat_is_read() -> None:
    assert parse_vm_stat(VM_STAT) == MachineMemory(37_000 * 16384, 150_000 * 16384)


@pytest.mark.parametrize("text", ["", "vm_stat: command not found", VM_STAT.partition("\n")[2]])
def test_what_is_not_vm_stats_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="vm_stat"):
        parse_vm_stat(text)


@pytest.mark.process
def test_a_mac_is_measured_by_vm_stat(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "vm_stat"
    script.write_text(f"#!/bin/sh\ncat <<'END'\n{VM_STAT}END\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(memory, "VM_STAT", (str(script),))
    assert memory.measure().wired == 150_000 * 16384
    script.write_text("#!/bin/sh\nexit 3\n")
    without = memory.measure()
    assert without.wired is None
    assert without.available > 0


def test_only_a_mac_is_kept_awake() -> None:
    assert command("linux", 17) is None
    assert command("darwin", 17) == ("caffeinate", "-i", "-m", "-w", "17")


@pytest.mark.process
def test_what_keeps_it_awake_ends_with_the_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "caffeinate"
    script.write_text('#!/bin/sh\necho "$$ $*" > "$(dirname "$0")/ran"\nexec sleep 60\n')
    script.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "platform", "darwin")
    notes: list[str] = []
    with awake(notes.append):
        deadline = time.monotonic() + 10
        while not (ran := tmp_path / "ran").exists() or not ran.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    pid, *arguments = ran.read_text().split()
    assert arguments == ["-i", "-m", "-w", str(os.getpid())]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
    script.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with awake(notes.append):
        pass
    assert "may fall asleep" in notes[0]


def test_a_report_of_jetsams_names_whom_it_killed(tmp_path: Path) -> None:
    report = tmp_path / "JetsamEvent-2030-01-02-030405.ips"
    header = {"bug_type": "298", "timestamp": "2030-01-02 03:04:05.00 +0000"}
    body = {
        "memoryStatus": {"pageSize": 16384},
        "processes": [
            {"pid": 17, "name": "Python", "reason": "vm-pageshortage"},
            {"pid": 18, "name": "Python"},
        ],
    }
    report.write_text(f"{json.dumps(header)}\n{json.dumps(body, indent=2)}")
    assert jetsam_report(17, tmp_path) == report
    assert jetsam_report(18, tmp_path) is None
    os.utime(report, (0, 0))
    assert jetsam_report(17, tmp_path) is None
    (tmp_path / "JetsamEvent-2031.ips").write_text("of another form")
    assert jetsam_report(17, tmp_path) is None
    assert jetsam_report(17, tmp_path / "missing") is None


# -- Linux -----------------------------------------------------------------------------------


def test_a_kill_by_the_system_leaves_evidence() -> None:
    kills = iter([3, 3, 4, 4, 4, None])
    watched = OomWatch(lambda: next(kills))
    assert watched.evidence(1, footprint=5, limit=0) == ""
    assert watched.evidence(1, footprint=5, limit=10) == (
        "the kernel's count of out-of-memory kills went from 3 to 4"
    )
    assert watched.evidence(1, footprint=8 * GB, limit=10 * GB) == ""
    assert (
        watched.evidence(1, footprint=9 * GB, limit=10 * GB) == "its memory was 9.0 GB of 10.0 GB"
    )
    assert watched.evidence(1, footprint=5, limit=10) == ""


def test_each_of_several_kills_by_the_system_is_evidence_for_one_worker() -> None:
    kills, clock = [3, 5, 5, 5, 7, 7, 7], [0.0]
    reading = iter(kills)
    watched = OomWatch(lambda: next(reading), clock=lambda: clock[0])

    def evidence() -> bool:
        return bool(watched.evidence(1, footprint=5, limit=0))

    assert [evidence(), evidence(), evidence()] == [True, True, False]
    assert evidence()
    clock[0] += 9.0
    assert evidence(), "its memory was large"
    assert not evidence()


def test_a_kill_long_after_a_shortage_is_somebody_elses() -> None:
    reading, clock = iter([3, 5, 5, 6, 6]), [0.0]
    watched = OomWatch(lambda: next(reading), clock=lambda: clock[0])
    assert watched.evidence(1, footprint=5, limit=0)
    clock[0] += 11.0
    assert not watched.evidence(1, footprint=5, limit=0)
    watched.poll()  # another program's
    clock[0] += 11.0
    assert not watched.evidence(1, footprint=5, limit=0)


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for ``/``."""
    monkeypatch.setattr(cgroups, "PROC", tmp_path / "proc")
    monkeypatch.setattr(cgroups, "ROOT", tmp_path / "cgroup")
    write(tmp_path / "proc/vmstat", "nr_free_pages 17\noom_kill 41\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_second_version_of_cgroups(system: Path) -> None:
    write(system / "proc/self/cgroup", "0::/user.slice/mayfly.service\n")
    parent, own = system / "cgroup/user.slice", system / "cgroup/user.slice/mayfly.service"
    for folder, limit, used in ((parent, "1000", "700"), (own, "max", "300")):
        write(folder / "memory.max", f"{limit}\n")
        write(folder / "memory.current", f"{used}\n")
        write(folder / "memory.stat", "anon 50\nactive_file 60\ninactive_file 40\n")
    write(own / "memory.events", "low 0\nhigh 0\nmax 9\noom 3\noom_kill 2\n")
    assert cgroups.memory_limit() == 1000
    assert cgroups.memory_available() == 1000 - (700 - 60 - 40)
    assert cgroups.oom_kills() == 2


def test_the_first_version_of_cgroups(system: Path) -> None:
    write(system / "proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/box\n0::/\n")
    own = system / "cgroup/memory/box"
    write(own / "memory.limit_in_bytes", "1000\n")
    write(own / "memory.usage_in_bytes", "900\n")
    write(own / "memory.stat", "active_file 1\ntotal_active_file 20\ntotal_inactive_file 30\n")
    write(own / "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    write(system / "cgroup/memory/memory.limit_in_bytes", f"{(1 << 63) - 4096}\n")
    write(system / "cgroup/memory/memory.usage_in_bytes", "5000\n")
    assert (cgroups.memory_limit(), cgroups.memory_available(), cgroups.oom_kills()) == (
        1000,
        150,
        5,
    )


def test_a_container_that_sees_its_own_cgroup_as_the_root(system: Path) -> None:
    write(system / "proc/self/cgroup", "0::/docker/0123abc\n")
    write(system / "cgroup/memory.max", "500\n")
    write(system / "cgroup/memory.current", "200\n")
    assert (cgroups.memory_limit(), cgroups.memory_available()) == (500, 300)
    assert cgroups.oom_kills() == 41  # of the machine


def test_a_system_without_cgroups(system: Path) -> None:
    assert (cgroups.memory_limit(), cgroups.memory_available(), cgroups.oom_kills()) == (
        None,
        None,
        41,
    )


def test_this_machine_can_be_measured() -> None:
    assert 0 < memory.measure().available <= memory.total()


@pytest.mark.process
def test_a_real_kill_for_memory_is_counted(small_cgroup: SmallCgroup) -> None:
    small_cgroup.limit(40 << 20)
    watched = OomWatch(lambda: small_cgroup.cgroup.oom_kills)
    join = f"open({str(small_cgroup.folder / 'cgroup.procs')!r}, 'w').write('0')"
    greedy = subprocess.run([sys.executable, "-c", f"{join}; x = b'.' * (400 << 20)"], check=False)
    assert greedy.returncode == -signal.SIGKILL
    assert "from 0 to 1" in watched.evidence(1, 0, 0)
