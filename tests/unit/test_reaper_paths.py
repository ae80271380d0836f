"""Folders, locks and sockets of a node."""

from __future__ import annotations

import os
import resource
import tempfile
from pathlib import Path

import pytest

from mayfly_reaper import paths
from mayfly_reaper.paths import IncarnationNumbers, Runtime, StartError, locked, opened, runtime_of
from mayfly_reaper.processes.front_end import listen
from mayfly_reaper.processes.spawn import STDERR_MAX_BYTES, STDERR_TAIL_BYTES, StderrFile


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /tmp."""
    monkeypatch.setattr(paths, "SHARED_TEMPORARY", tmp_path / "shared")
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


def test_each_state_directory_has_sockets_of_its_own(tmp_path: Path) -> None:
    one, two = runtime_of(tmp_path / "one"), runtime_of(tmp_path / "two")
    assert one.folder != two.folder
    assert one == runtime_of(tmp_path / "three" / ".." / "one")
    assert one.folder.parent == Path(f"/tmp/mayfly-{os.geteuid()}")
    assert len(one.folder.name) == 8
    assert one.control == f"ipc://{one.folder}/node.ipc"
    assert len(str(one.worker(10**9))) < 104
    assert one.worker(1) != one.worker(2)


def test_the_folder_is_private_and_goes_at_the_end(shared: Path, tmp_path: Path) -> None:
    runtime = runtime_of(tmp_path)
    with opened(runtime):
        assert runtime.folder.stat().st_mode & 0o777 == 0o700
        runtime.worker(1).touch()
        (runtime.folder / "node.ipc").touch()
    assert not runtime.folder.exists()


def test_only_our_own_leftovers_are_removed(shared: Path, tmp_path: Path) -> None:
    runtime = runtime_of(tmp_path)
    with opened(runtime):
        pass
    runtime.folder.mkdir(mode=0o700)
    for name in ("node.ipc", "roster.ipc", "w17.ipc", "mine.txt"):
        (runtime.folder / name).touch()
    with opened(runtime):
        assert [path.name for path in runtime.folder.iterdir()] == ["mine.txt"]
    assert (runtime.folder / "mine.txt").exists()


def test_a_folder_that_others_may_enter_is_refused(shared: Path, tmp_path: Path) -> None:
    runtime = runtime_of(tmp_path)
    runtime.folder.parent.mkdir(mode=0o755)
    runtime.folder.parent.chmod(0o755)
    with pytest.raises(StartError, match="others may enter it"), opened(runtime):
        pass


def test_a_link_in_the_folders_place_is_refused(shared: Path, tmp_path: Path) -> None:
    runtime = runtime_of(tmp_path)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    runtime.folder.parent.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartError, match="not a folder"), opened(runtime):
        pass


def test_a_folder_of_another_user_is_refused(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = runtime_of(tmp_path)
    with opened(runtime):
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(StartError, match="belongs to user"), opened(runtime):
            pass
        monkeypatch.undo()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("variable", ["XDG_RUNTIME_DIR", "TMPDIR"])
def test_S20_a_name_that_another_user_has_taken_is_left_to_them(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv(variable, str(own))
    monkeypatch.setattr(tempfile, "tempdir", None)  # what it found out before
    usual = runtime_of(tmp_path).folder.parent
    assert usual.parent == shared
    usual.mkdir()
    os.chown(usual, 12345, -1)
    runtime = runtime_of(tmp_path)
    assert runtime.folder.parent.parent == own
    with opened(runtime):
        assert runtime.folder.stat().st_mode & 0o777 == 0o700
    assert list(usual.iterdir()) == []


def test_a_file_in_the_folders_place_is_refused(shared: Path, tmp_path: Path) -> None:
    runtime = Runtime(shared / "mayfly" / "x")
    runtime.folder.parent.touch(mode=0o600)
    with pytest.raises(StartError, match="cannot make"), opened(runtime):
        pass


def test_a_state_directory_is_held_by_one(tmp_path: Path) -> None:
    state = tmp_path / "new" / "state"
    with (
        locked(state),
        pytest.raises(StartError, match=rf"\(pid {os.getpid()}\)"),
        locked(state),
    ):
        pass
    with locked(state):
        pass


def test_a_state_directory_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = pytest.raises(StartError, match=r"cannot use the state directory .*--state-dir")
    with refused, locked(tmp_path / "file"):
        pass


def test_no_number_is_given_twice(tmp_path: Path) -> None:
    path = tmp_path / "incarnation"
    first = IncarnationNumbers(path)
    assert [first.take(), first.take()] == [1, 2]
    assert IncarnationNumbers(path).take() == 3
    path.write_text("three")
    with pytest.raises(StartError, match="remove it"):
        IncarnationNumbers(path)


def test_a_number_outlives_a_full_disk(tmp_path: Path) -> None:
    """No file can grow for a while: the reaper after that one goes on from the last number kept."""
    path = tmp_path / "incarnation"
    numbers = IncarnationNumbers(path)
    numbers.take()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        assert numbers.take() == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert IncarnationNumbers(path).take() == 2


def test_a_number_that_cannot_be_kept_is_given_all_the_same(tmp_path: Path) -> None:
    numbers = IncarnationNumbers(tmp_path / "missing" / "incarnation")
    assert [numbers.take(), numbers.take()] == [1, 2]


def test_a_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(StartError, match=r"cannot listen on 192\.0\.2\.1"):
        listen("192.0.2.1", 0)


def test_a_port_is_listened_on() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(StartError, match=f"port {port}: Address already in use"):
            listen("127.0.0.1", port)


def test_the_end_of_stderr_is_kept(tmp_path: Path) -> None:
    file = StderrFile(tmp_path / "x.log")
    os.write(file.fileno(), b"one\ntwo \xff\n")
    assert file.tail() == "one\ntwo \ufffd\n"
    line = b"x" * 99 + b"\n"
    os.write(file.fileno(), line * (STDERR_MAX_BYTES // 100))
    file.trim()
    assert len(file.tail()) > STDERR_MAX_BYTES // 1000
    os.write(file.fileno(), line + b"the last\n")
    file.trim()
    tail = file.tail()
    assert (tmp_path / "x.log").stat().st_size < STDERR_TAIL_BYTES + 200
    assert tail.startswith("x" * 99 + "\n")
    assert tail.endswith("x\nthe last\n")
    assert len(tail) <= STDERR_TAIL_BYTES
    file.close()
    assert not (tmp_path / "x.log").exists()
