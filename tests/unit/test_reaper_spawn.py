"""Command, environment and files with which a worker is started."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from mayfly_reaper.paths import Runtime, StartError
from mayfly_reaper.processes import spawn
from mayfly_reaper.processes.signals import SignalInbox
from mayfly_reaper.processes.spawn import Spawner, removed_variables, worker_environment
from mayfly_reaper.rules.mitigations import Mitigations
from mayfly_reaper.settings import NodeSettings, Pool
from support.node import wait_until

PTX = Path("/state/ptx/s-0")


def test_a_worker_gets_the_variables_that_were_found_to_matter() -> None:
    environment = worker_environment({"HOME": "/h"}, {}, PTX, None)
    assert environment == {
        "HOME": "/h",
        "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
        "MLX_CUDA_GRAPH_CACHE_SIZE": "2000",
        "MLX_PTX_CACHE_DIR": "/state/ptx/s-0",
    }


def test_the_user_has_the_last_word_but_for_what_locks_the_gpu() -> None:
    inherited = {"MLX_CUDA_GRAPH_CACHE_SIZE": "50", "MLX_METAL_FAST_SYNCH": "1"}
    environment = worker_environment(inherited, {"MLX_PTX_CACHE_DIR": "/mine"}, PTX, None)
    assert environment["MLX_CUDA_GRAPH_CACHE_SIZE"] == "50"
    assert environment["MLX_PTX_CACHE_DIR"] == "/mine"
    assert "MLX_METAL_FAST_SYNCH" not in environment
    assert removed_variables(inherited) == ["MLX_METAL_FAST_SYNCH"]
    own = {"MLX_METAL_FAST_SYNCH": "1"}
    assert worker_environment(inherited, own, PTX, None)["MLX_METAL_FAST_SYNCH"] == "1"


def test_no_worker_learns_a_key() -> None:
    keys = dict.fromkeys(("MAYFLY_API_KEYS", "MAYFLY_ADMIN_KEY", "MAYFLY_API_KEY"), "secret")
    assert "secret" not in worker_environment(keys, {}, PTX, None).values()
    assert removed_variables(keys) == []


def test_a_successor_is_spared_what_its_predecessors_died_of() -> None:
    spared = Mitigations(without_graphs=True, short_buffers=True)
    environment = worker_environment({"MLX_MAX_MB_PER_BUFFER": "33"}, {}, PTX, None, spared)
    assert environment["MLX_USE_CUDA_GRAPHS"] == "0"
    assert environment["MLX_MAX_OPS_PER_BUFFER"] == "10"
    assert environment["MLX_MAX_MB_PER_BUFFER"] == "33"
    own = {"MLX_USE_CUDA_GRAPHS": "1"}
    assert worker_environment({}, own, PTX, None, spared)["MLX_USE_CUDA_GRAPHS"] == "1"


def test_a_preload_joins_those_that_are_there() -> None:
    assert worker_environment({}, {}, PTX, "b.so")["LD_PRELOAD"] == "b.so"
    assert worker_environment({"LD_PRELOAD": "a.so"}, {}, PTX, "b.so")["LD_PRELOAD"] == "b.so:a.so"


@pytest.mark.parametrize(
    ("found", "said"),
    [("libopenblas.so.0", "workers compute with libopenblas.so.0"), (None, "apt install")],
)
def test_the_operator_is_told_once_what_blas_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str | None, said: str
) -> None:
    monkeypatch.setattr(spawn, "wants_blas", lambda: True)
    monkeypatch.setattr(spawn, "find_blas", lambda: found)
    notes: list[str] = []
    settings = NodeSettings("n", tmp_path, ())
    Spawner(settings, Runtime(tmp_path), notes.append)
    assert len(notes) == 1
    assert said in notes[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [({"max_row": 3}, "no option max_row"), ({"max_rows": "many"}, "max_rows")],
)
def test_options_that_no_worker_has_are_refused(
    tmp_path: Path, options: dict[str, object], said: str
) -> None:
    settings = NodeSettings("n", tmp_path, (Pool("m", tmp_path, options=options),))
    with pytest.raises(StartError, match=said):
        Spawner(settings, Runtime(tmp_path), lambda _: None)


@pytest.mark.process
def test_a_command_that_is_not_there_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    pool = Pool("m", tmp_path)
    settings = NodeSettings(
        "n", tmp_path, (pool,), preload_blas=False, worker_command=(str(tmp_path / "none"),)
    )
    spawner = Spawner(settings, Runtime(tmp_path), lambda _: None)
    with pytest.raises(OSError):
        spawner.spawn("s-0", pool, 1)
    assert list((tmp_path / "stderr").iterdir()) == []


def spawner(tmp_path: Path, notes: list[str]) -> tuple[Spawner, Pool]:
    """A spawner whose workers print their settings and exit."""
    command = (sys.executable, "-c", "import sys; print(sys.argv[-1], file=sys.stderr)")
    pool = Pool("m", tmp_path, options={"max_rows": 8})
    settings = NodeSettings("n", tmp_path, (pool,), preload_blas=False, worker_command=command)
    return Spawner(settings, Runtime(tmp_path), notes.append), pool


@pytest.mark.process
def test_a_worker_is_told_where_to_leave_its_breadcrumb_and_what_it_is_spared(
    tmp_path: Path,
) -> None:
    starts, pool = spawner(tmp_path, [])
    process = starts.spawn("s-0", pool, 7, Mitigations(halved_rows=1))
    wait_until(lambda: process.poll() is not None, "the worker leaves")
    said = process.stderr.tail()
    assert said.strip() == process.settings_json
    assert json.loads(said)["breadcrumb"] == str(process.crumb) == str(tmp_path / "w7.crumb")
    assert json.loads(said)["max_rows"] == 4
    process.crumb.touch()
    process.clear()
    assert not process.crumb.exists()


@pytest.mark.process
def test_where_nothing_can_be_kept_workers_start_all_the_same(tmp_path: Path) -> None:
    notes: list[str] = []
    starts, pool = spawner(tmp_path, notes)
    (tmp_path / "stderr").rmdir()
    (tmp_path / "ptx").touch()
    processes = [starts.spawn("s-0", pool, incarnation) for incarnation in (1, 2)]
    wait_until(lambda: all(process.poll() == 0 for process in processes), "both leave")
    for process in processes:
        assert process.stderr.tail() == ""
        process.stderr.trim()
        process.clear()
    assert Path(os.devnull).exists()
    assert len(notes) == 2
    assert "compiled kernels cannot be kept" in notes[0]
    assert "stderr of workers cannot be kept" in notes[1]


def test_a_slots_kernels_are_wiped_and_no_others(tmp_path: Path) -> None:
    starts, _ = spawner(tmp_path, [])
    for slot in ("s-0", "s-1"):
        (tmp_path / "ptx" / slot).mkdir(parents=True)
        (tmp_path / "ptx" / slot / "kernel.ptx").touch()
    starts.wipe_kernels("s-0")
    assert [path.parent.name for path in tmp_path.glob("ptx/*/*")] == ["s-1"]


def test_signals_are_only_taken_note_of(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    with SignalInbox() as inbox:
        assert inbox.read() == []
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
        assert sorted(inbox.read()) == [signal.SIGHUP, signal.SIGTERM]
        assert inbox.read() == []
    assert before == {number: signal.getsignal(number) for number in before}


def test_a_hangup_that_was_ignored_stays_ignored() -> None:
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalInbox() as inbox:
            os.kill(os.getpid(), signal.SIGHUP)
            assert inbox.read() == []
    finally:
        signal.signal(signal.SIGHUP, handler)
