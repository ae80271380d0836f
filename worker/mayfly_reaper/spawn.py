"""Starting a worker's process, and holding on to it.

Always with an argument list and from the reaper's main thread, never by fork or multiprocessing:
threads and locks do not survive a fork. The worker's stdin is a pipe whose other end only the
reaper has: when it ends, the reaper is gone. Workers have sessions of their own, so that a Ctrl-C
in the terminal reaches the reaper alone.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from mayfly_protocol.settings import WorkerSettings, worker_settings
from mayfly_reaper.environment import (
    HOW_TO_GET_BLAS,
    find_blas,
    removed,
    wants_blas,
    worker_environment,
)
from mayfly_reaper.errors import StartError
from mayfly_reaper.paths import Runtime
from mayfly_reaper.settings import NodeSettings, Pool
from mayfly_reaper.stderr_file import StderrFile


class WorkerProcess:
    """One incarnation's process, with what it leaves behind."""

    def __init__(
        self, process: subprocess.Popen[bytes], stderr: StderrFile, endpoint: Path
    ) -> None:
        self._process = process
        self._endpoint = endpoint
        self.stderr = stderr

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit status, a signal's number negated; None while it runs."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Does nothing where the process has been seen to be gone: its pid may be another's."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Ends it here and now, and waits until it is gone."""
        self._process.kill()
        self._process.wait()

    def clear(self) -> None:
        """Removes what is left of a process that is gone."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self.stderr.close()
        self._endpoint.unlink(missing_ok=True)


class Spawner:
    """Knows how this node starts its workers.

    Args:
        note: is told, once, what the operator should know of the workers' environment.

    Raises:
        StartError: a pool's options are not a worker's.
    """

    def __init__(
        self, settings: NodeSettings, runtime: Runtime, note: Callable[[str], None]
    ) -> None:
        self._command = settings.worker_command
        self._state_dir = settings.state_dir
        self._runtime = runtime
        for pool in settings.pools:
            _check_options(pool)
        for name in removed(os.environ):
            note(f"{name} is set and not passed on to workers: it can leave the GPU locked")
        self._blas = _blas(note) if settings.preload_blas and wants_blas() else None
        self._stderr_dir = self._state_dir / "stderr"
        self._stderr_dir.mkdir(exist_ok=True)
        for left in self._stderr_dir.glob("*.log"):
            left.unlink()

    def spawn(self, slot: str, pool: Pool, incarnation: int) -> WorkerProcess:
        """Starts a process. Raises OSError if the system does not let us."""
        endpoint = self._runtime.worker(incarnation)
        told = WorkerSettings(
            slot=slot,
            incarnation=incarnation,
            control=self._runtime.control,
            listen=f"ipc://{endpoint}",
            model_path=str(pool.model_path.resolve()),
            model_name=pool.model_name,
            **pool.options,  # type: ignore[arg-type]  # checked when the node started
        )
        ptx_folder = self._state_dir / "ptx" / slot
        ptx_folder.mkdir(parents=True, exist_ok=True)
        stderr = StderrFile(self._stderr_dir / f"{slot}-{incarnation}.log")
        try:
            process = subprocess.Popen(
                [*self._command, "--settings", worker_settings.dump_json(told).decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr.fileno(),
                env=worker_environment(os.environ, pool.environment, ptx_folder, self._blas),
                start_new_session=True,
            )
        except OSError:
            stderr.close()
            raise
        return WorkerProcess(process, stderr, endpoint)


def _check_options(pool: Pool) -> None:
    known = {field.name for field in fields(WorkerSettings)}
    unknown = sorted(pool.options.keys() - known)
    if unknown:
        raise StartError(f"model {pool.model_name}: workers have no option {', '.join(unknown)}")
    given = {
        **{"slot": "", "incarnation": 0, "control": "", "listen": ""},
        **{"model_path": str(pool.model_path), "model_name": pool.model_name},
        **pool.options,
    }
    try:
        worker_settings.validate_python(given)
    except ValueError as error:
        raise StartError(f"model {pool.model_name}: {error}") from error


def _blas(note: Callable[[str], None]) -> str | None:
    blas = find_blas()
    note(f"workers compute with {blas} (LD_PRELOAD)" if blas else HOW_TO_GET_BLAS)
    return blas
