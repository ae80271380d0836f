"""Starting a worker's process, and holding on to it.

Always with an argument list and from the reaper's main thread, never by fork or multiprocessing:
threads and locks do not survive a fork. The worker's stdin is a pipe whose other end only the
reaper has: when it ends, the reaper is gone. Workers have sessions of their own, so that a Ctrl-C
in the terminal reaches the reaper alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from mayfly_protocol import identity
from mayfly_protocol.addresses import bracketed
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
from mayfly_reaper.precautions import NONE, Precautions
from mayfly_reaper.settings import Network, NodeSettings, Pool
from mayfly_reaper.stderr_file import StderrFile
from mayfly_reaper.telling import Once


class WorkerProcess:
    """One incarnation's process, with what it leaves behind. ``told`` is its settings as they
    stand on its command line; ``crumb`` the file that it writes before each forward pass."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        told: str,
        stderr: StderrFile,
        endpoint: Path,
        crumb: Path,
    ) -> None:
        self._process = process
        self._endpoint = endpoint
        self.told = told
        self.stderr = stderr
        self.crumb = crumb

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
        self.crumb.unlink(missing_ok=True)


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
        self._logs = settings.logs
        self._state_dir = settings.state_dir
        self._runtime = runtime
        self._memory_share = 1 / max(1, sum(pool.workers for pool in settings.pools))
        for pool in settings.pools:
            _check_options(pool)
        for name in removed(os.environ):
            note(f"{name} is set and not passed on to workers: it can leave the GPU locked")
        self._complain = Once(note)
        self._blas = _blas(note) if settings.preload_blas and wants_blas() else None
        self._network = settings.network
        self._trusted = ""
        if settings.network is not None and identity.secret_file(self._state_dir).exists():
            self._trusted = str(identity.trusted_file(self._state_dir))
        self._stderr_dir = self._state_dir / "stderr"
        try:
            self._stderr_dir.mkdir(exist_ok=True)
        except OSError as error:
            raise StartError(f"cannot make {self._stderr_dir}: {error.strerror}") from error
        for left in self._stderr_dir.glob("*.log"):
            left.unlink(missing_ok=True)

    def spawn(
        self, slot: str, pool: Pool, incarnation: int, precautions: Precautions = NONE
    ) -> WorkerProcess:
        """Starts a process. Raises OSError if the system does not let us."""
        endpoint = self._runtime.worker(incarnation)
        crumb = self._runtime.breadcrumb(incarnation)
        settings = WorkerSettings(
            slot=slot,
            incarnation=incarnation,
            control=self._runtime.control,
            listen=_listen(self._network, endpoint),
            model_path=str(pool.model_path.resolve()),
            model_name=pool.model_name,
            breadcrumb=str(crumb),
            canary_dir=str(self._state_dir / "canary"),
            memory_share=self._memory_share,
            trusted=self._trusted,
            logs=self._logs,
            **precautions.options(pool.options),  # type: ignore[arg-type]  # checked at the start
        )
        told = worker_settings.dump_json(settings).decode()
        environment = worker_environment(
            os.environ, pool.environment, self._kernels(slot), self._blas, precautions
        )
        stderr = self._stderr(f"{slot}-{incarnation}.log")
        try:
            process = subprocess.Popen(
                [*self._command, "--settings", told],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr.fileno(),
                env=environment,
                start_new_session=True,
            )
        except OSError:
            stderr.close()
            raise
        return WorkerProcess(process, told, stderr, endpoint, crumb)

    def wipe_kernels(self, slot: str) -> None:
        """Removes the slot's compiled kernels; there must be no process that uses them."""
        shutil.rmtree(self._kernels(slot), ignore_errors=True)

    def _kernels(self, slot: str) -> Path:
        folder = self._state_dir / "ptx" / slot
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:  # a full disk: MLX does without
            self._complain(f"compiled kernels cannot be kept: {error.strerror}")
        return folder

    def _stderr(self, name: str) -> StderrFile:
        try:
            return StderrFile(self._stderr_dir / name)
        except OSError as error:
            self._complain(f"what workers write to stderr cannot be kept: {error.strerror}")
            return StderrFile(None)


def _listen(network: Network | None, path: Path) -> str:
    if network is None:
        return f"ipc://{path}"
    return f"tcp://{bracketed(network.host)}:{network.worker_ports}"


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
