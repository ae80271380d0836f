"""Files and sockets of a node.

::

    <state directory>/lock               locked by the running reaper; holds the reaper's pid
                      incarnation        number of the last worker process
                      workers.json       workers that run, for the successor of a killed reaper
                      autopsies.jsonl    crash records; older files are .1 (the youngest) to .3
                      stderr/            each worker's stderr, until the worker is gone
                      ptx/<slot>/        compiled CUDA kernels

    /tmp/mayfly-<uid>/<8 hex>/node.ipc   the reaper's ROUTER
                              roster.ipc its XPUB
                              w<n>.ipc   the ROUTER of the worker with this number
                              w<n>.crumb the requests of the worker's current forward pass

Sockets are not in the state directory because macOS allows their paths 104 bytes. The 8 hex digits
are a hash of the state directory's path, so that nodes with different state directories run side by
side. Where another user has taken the name in /tmp, XDG_RUNTIME_DIR or this user's own temporary
folder stands for it. Only this user may read any of these files. A second bind on an ipc path
silently takes the path from the first socket: the lock keeps a second reaper away.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

SHARED_TEMPORARY = Path("/tmp")  # noqa: S108 - checked below; macOS's own TMPDIR is too long

_log = logging.getLogger(__name__)


class StartError(Exception):
    """Error for an obstacle to starting a node; the text names the obstacle and what to do about
    it."""


class IncarnationNumbers:
    """Source of numbers for worker processes: 1, 2, 3, and so on. The last number is in a file of
    the state directory, which the caller has locked, so that no number is given twice even when the
    reaper restarts.

    A worker that outlives a killed reaper comes back to the next reaper's socket under its old
    routing id, which contains its number. If the number were given again, the next reaper would
    take this worker's messages for those of a worker of its own, and the socket would refuse that
    other worker.

    Raises:
        StartError: the file exists and cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._last = int(path.read_text()) if path.exists() else 0
        except (OSError, ValueError) as error:
            raise StartError(f"cannot read a number from {path}: {error}; remove it") from error

    def take(self) -> int:
        """Returns the next number. If the number cannot be written to the file, only this reaper
        knows it."""
        self._last += 1
        try:
            rewrite(self._path, f"{self._last}\n")
        except OSError as error:
            _log.warning(
                "cannot write the newest worker's number to %s; after a restart of the reaper "
                "another worker may get it: %s",
                self._path,
                error,
            )
        return self._last


@dataclass(frozen=True, slots=True)
class Runtime:
    """Folder of a node's ipc sockets, and the addresses of these sockets."""

    folder: Path

    @property
    def control(self) -> str:
        """ZeroMQ address at which the reaper takes messages of workers, front ends and the command
        line."""
        return f"ipc://{self.folder}/node.ipc"

    @property
    def roster(self) -> str:
        """ZeroMQ address at which the reaper publishes rosters (the node's state)."""
        return f"ipc://{self.folder}/roster.ipc"

    def worker(self, incarnation: int) -> Path:
        """Returns the path of one worker process's socket. No other process binds the path, as the
        numbers of worker processes are never given again."""
        return self.folder / f"w{incarnation}.ipc"

    def breadcrumb(self, incarnation: int) -> Path:
        """Returns the path of the file in which a worker process notes the requests of each forward
        pass."""
        return self.folder / f"w{incarnation}.crumb"

    def sweep(self) -> None:
        """Removes the sockets and breadcrumb files (notes of forward passes) that a killed reaper
        and its workers left in this folder."""
        for name in ("node.ipc", "roster.ipc"):
            (self.folder / name).unlink(missing_ok=True)
        for pattern in ("w*.ipc", "w*.crumb"):
            for path in self.folder.glob(pattern):
                path.unlink(missing_ok=True)


def runtime_of(state_dir: Path) -> Runtime:
    """Returns the folder for the sockets of the node with this state directory, whether it runs or
    not: below /tmp, or where another user has taken the name there, in this user's own temporary
    folder."""
    name = hashlib.sha256(os.fsencode(state_dir.resolve())).hexdigest()[:8]
    usual = SHARED_TEMPORARY / f"mayfly-{os.geteuid()}"
    own = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    private = Path(own) / usual.name
    return Runtime((private if _belongs_to_another(usual) else usual) / name)


def _belongs_to_another(folder: Path) -> bool:
    try:
        return folder.lstat().st_uid != os.geteuid()
    except OSError:
        return False


@contextmanager
def locked(state_dir: Path) -> Iterator[None]:
    """Locks the state directory inside a ``with`` block, and makes the directory if it is missing.

    Raises:
        StartError: another reaper holds the lock, or the directory cannot be written to.
    """
    path = state_dir / "lock"
    try:
        make_folder(state_dir)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StartError(
            f"cannot use the state directory {state_dir}: {error}; "
            "name another one with --state-dir"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = os.pread(descriptor, 20, 0).decode(errors="replace").strip() or "unknown"
            raise StartError(
                f"another mayfly serves from this state directory (pid {pid}): {state_dir}; "
                "stop it, or name another one with --state-dir"
            ) from error
        os.ftruncate(descriptor, 0)
        with suppress(OSError):  # a full disk; the pid is only for people
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)  # and with it the lock; the file stays, for unlinking it would race


@contextmanager
def opened(runtime: Runtime) -> Iterator[None]:
    """Makes an empty folder for a node's sockets, and removes the folder at the end of a ``with``
    block.

    Raises:
        StartError: the folder is not this user's alone.
    """
    _make_private(runtime.folder.parent)
    _make_private(runtime.folder)
    runtime.sweep()
    try:
        yield
    finally:
        runtime.sweep()
        with suppress(OSError):  # somebody else's file in it is not ours to remove
            runtime.folder.rmdir()


def _make_private(folder: Path) -> None:
    """Makes a folder of mode 0700, or checks that an existing folder is private: anyone may write
    to /tmp, and the owner of a socket's folder can put another socket in its place."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise StartError(f"cannot make {folder} for sockets: {error}") from error
    if not stat.S_ISDIR(found.st_mode):
        wrong = "it is not a folder"
    elif found.st_uid != os.geteuid():
        wrong = f"it belongs to user {found.st_uid}"
    elif found.st_mode & 0o077:
        wrong = f"others may enter it (mode {stat.S_IMODE(found.st_mode):o})"
    else:
        return
    raise StartError(
        f"{folder} cannot be trusted with sockets: {wrong}; remove it, or name another temporary "
        "folder that is only yours with XDG_RUNTIME_DIR"
    )


def rewrite(path: Path, text: str) -> None:
    """Replaces a file by a new one with this text: whole or, on a full disk, not at all. Raises
    OSError if the file cannot be written."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with open(new, "w", opener=private) as file:
        file.write(text)
    new.replace(path)


def private(path: str, flags: int) -> int:
    """Opens a file for the builtin function ``open``; only this user may read a new one."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def make_folder(folder: Path) -> None:
    """Makes a folder of the node's state if it is missing, for this user alone. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
