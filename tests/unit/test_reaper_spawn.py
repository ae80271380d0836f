"""What a worker is started with."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from mayfly_reaper import spawn
from mayfly_reaper.environment import removed, worker_environment
from mayfly_reaper.errors import StartError
from mayfly_reaper.paths import Runtime
from mayfly_reaper.processes import SignalInbox
from mayfly_reaper.settings import NodeSettings, Pool
from mayfly_reaper.spawn import Spawner

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
    assert removed(inherited) == ["MLX_METAL_FAST_SYNCH"]
    own = {"MLX_METAL_FAST_SYNCH": "1"}
    assert worker_environment(inherited, own, PTX, None)["MLX_METAL_FAST_SYNCH"] == "1"


def test_no_worker_learns_a_key() -> None:
    keys = dict.fromkeys(("MAYFLY_API_KEYS", "MAYFLY_ADMIN_KEY", "MAYFLY_API_KEY"), "secret")
    assert "secret" not in worker_environment(keys, {}, PTX, None).values()
    assert removed(keys) == []


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


def test_a_command_that_is_not_there_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    pool = Pool("m", tmp_path)
    settings = NodeSettings(
        "n", tmp_path, (pool,), preload_blas=False, worker_command=(str(tmp_path / "none"),)
    )
    spawner = Spawner(settings, Runtime(tmp_path), lambda _: None)
    with pytest.raises(OSError):
        spawner.spawn("s-0", pool, 1)
    assert list((tmp_path / "stderr").iterdir()) == []


def test_signals_are_only_taken_note_of(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    with SignalInbox() as inbox:
        assert inbox.take() == []
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
        assert sorted(inbox.take()) == [signal.SIGHUP, signal.SIGTERM]
        assert inbox.take() == []
    assert before == {number: signal.getsignal(number) for number in before}


def test_a_hangup_that_was_ignored_stays_ignored() -> None:
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalInbox() as inbox:
            os.kill(os.getpid(), signal.SIGHUP)
            assert inbox.take() == []
    finally:
        signal.signal(signal.SIGHUP, handler)
