"""Starts the process of a worker, with its settings, environment and stderr file.

A worker is always started with an argument list and from the reaper's main thread, never by fork or
multiprocessing: threads and locks do not survive a fork. The worker's stdin is a pipe whose other
end only the reaper has: when the pipe ends, the worker knows that the reaper is gone. Workers have
sessions of their own, so that a Ctrl-C in the terminal reaches the reaper alone.

A worker's stderr is a file and not a pipe, so that a reaper that is busy, stopped or gone never
blocks or kills a worker that writes to stderr. The file's last lines become part of the worker's
crash record (autopsy).

MLX reads its environment variables when it is imported, and numbers with ``atoi``: ``true`` means
0. Workers get the variables that the user has set unchanged, except for those that do harm
(:data:`REMOVED`) and those that hold API keys.
"""

from __future__ import annotations

import ctypes.util
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from importlib import metadata
from pathlib import Path

from mayfly_protocol.common.secrets import SECRET_VARIABLES
from mayfly_protocol.common.throttle import LogThrottle
from mayfly_protocol.settings import WorkerSettings, worker_settings
from mayfly_protocol.transport import keys
from mayfly_protocol.transport.addresses import bracketed
from mayfly_reaper.paths import Runtime, StartError, make_folder
from mayfly_reaper.rules.mitigations import NO_MITIGATIONS, Mitigations
from mayfly_reaper.settings import Network, NodeSettings, Pool

STDERR_TAIL_BYTES = 64 << 10
STDERR_MAX_BYTES = 4 << 20


class StderrFile:
    """File to which a worker appends its stderr. Without a path, the stderr is discarded.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path | None) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        self._path = path
        self._descriptor = os.open(path if path is not None else os.devnull, flags, 0o600)

    def fileno(self) -> int:
        return self._descriptor

    def tail(self) -> str:
        """Returns the last :data:`STDERR_TAIL_BYTES` of a worker's stderr, from the beginning of a
        line on."""
        size = os.fstat(self._descriptor).st_size
        start = max(0, size - STDERR_TAIL_BYTES)
        end = os.pread(self._descriptor, STDERR_TAIL_BYTES, start)
        if start:
            end = end.partition(b"\n")[2] or end
        return end.decode(errors="replace")

    def trim(self) -> None:
        """Cuts the file down to its tail if it is too large. Lines that the worker writes during
        the cut may be lost; later lines are appended at the new end."""
        if os.fstat(self._descriptor).st_size > STDERR_MAX_BYTES:
            tail = self.tail()
            os.ftruncate(self._descriptor, 0)
            with suppress(OSError):  # a full disk: then there is no tail
                os.write(self._descriptor, tail.encode())

    def close(self) -> None:
        """Closes and removes the file."""
        os.close(self._descriptor)
        if self._path is not None:
            self._path.unlink(missing_ok=True)


DEFAULTS = {
    # The check turns advice about performance into an exception out of mx.eval, after which the
    # encoder was poisoned before 0.32.2: ml-explore/mlx#4326, fixed by #4356. Read MLX again at
    # each upgrade.
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
    # Serving meets many shapes, and each is a graph of its own. MLX's 400 is too few; 0 throws.
    "MLX_CUDA_GRAPH_CACHE_SIZE": "2000",
}

# Fences that spin on the GPU: a process killed inside one has left the GPU locked for all others.
# MLX's own default is 0.
REMOVED = ("MLX_METAL_FAST_SYNCH",)

HOW_TO_GET_BLAS = (
    "no shared OpenBLAS was found: on this CPU MLX computes 10 to 25 times slower without it. "
    "Install one (Debian, Ubuntu: apt install libopenblas0-pthread; Fedora: dnf install "
    "openblas-threads; Arch: pacman -S openblas) and start again"
)


def worker_environment(
    inherited: Mapping[str, str],
    own: Mapping[str, str],
    ptx_folder: Path,
    blas: str | None,
    mitigations: Mitigations = NO_MITIGATIONS,
) -> dict[str, str]:
    """Returns the environment variables of a new worker process.

    Args:
        inherited: the reaper's environment.
        own: the variables configured for the model's workers, which override all others.
        ptx_folder: the folder for the compiled kernels of this worker's slot. MLX writes kernels
            non-atomically: a kill in the middle leaves a broken entry, which must not reach other
            workers.
        blas: the shared BLAS library to preload; None for none.
        mitigations: milder settings after the losses of earlier workers of the slot.
    """
    left_out = (*REMOVED, *SECRET_VARIABLES)
    environment = {name: value for name, value in inherited.items() if name not in left_out}
    for name, value in (DEFAULTS | mitigations.environment()).items():
        environment.setdefault(name, value)
    environment.setdefault("MLX_PTX_CACHE_DIR", str(ptx_folder))
    if blas is not None:
        others = environment.get("LD_PRELOAD", "")
        environment["LD_PRELOAD"] = f"{blas}:{others}" if others else blas
    return {**environment, **own}


def removed_variables(inherited: Mapping[str, str]) -> list[str]:
    """Returns the names of the variables that the user has set and that workers do not get, because
    they do harm."""
    return [name for name in REMOVED if name in inherited]


def wants_blas() -> bool:
    """Returns True if a worker is faster with a BLAS library (OpenBLAS) preloaded: if MLX is
    installed as the wheel for a Linux CPU, which brings a slow reference BLAS. On macOS MLX uses
    Accelerate, with CUDA cuBLAS."""
    try:
        metadata.version("mlx-cpu")
    except metadata.PackageNotFoundError:
        return False
    return sys.platform == "linux"


def find_blas() -> str | None:
    """Returns the name under which the dynamic linker finds a shared OpenBLAS, if there is one."""
    for name in ("openblas", "openblasp"):  # the second is Fedora's, with threads
        if found := ctypes.util.find_library(name):
            return found
    return None


class WorkerProcess:
    """One worker process with its files. ``settings_json`` is the text of its settings as it stands
    on its command line; ``crumb`` is the file in which the worker notes the requests of each
    forward pass before the pass begins."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        settings_json: str,
        stderr: StderrFile,
        endpoint: Path,
        crumb: Path,
    ) -> None:
        self._process = process
        self._endpoint = endpoint
        self.settings_json = settings_json
        self.stderr = stderr
        self.crumb = crumb

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Returns the process's exit status, a signal's number negated; None while the process
        runs."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Sends a signal to the process, but not after its end was seen: its pid may be another
        process's."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kills the process and waits until it is gone."""
        self._process.kill()
        self._process.wait()

    def clear(self) -> None:
        """Closes and removes the files of the process, which must be gone."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self.stderr.close()
        self._endpoint.unlink(missing_ok=True)
        self.crumb.unlink(missing_ok=True)


class Spawner:
    """Starts the worker processes of a node.

    Args:
        note: is called with sentences for the operator about the workers' environment, once with
            each sentence.

    Raises:
        StartError: the settings have an option that workers do not have or a value that workers do
            not take, or the folder for the workers' stderr cannot be made.
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
        for name in removed_variables(os.environ):
            note(f"the variable {name} is not passed on to workers: it can leave the GPU locked")
        self._note_once = LogThrottle(note, quiet_s=math.inf)
        self._blas = _blas(note) if settings.preload_blas and wants_blas() else None
        self._network = settings.network
        self._trusted = ""
        if settings.network is not None and keys.secret_file(self._state_dir).exists():
            self._trusted = str(keys.trusted_file(self._state_dir))
        self._stderr_dir = self._state_dir / "stderr"
        try:
            make_folder(self._stderr_dir)
        except OSError as error:
            raise StartError(f"cannot make {self._stderr_dir}: {error.strerror}") from error
        for left in self._stderr_dir.glob("*.log"):
            left.unlink(missing_ok=True)

    def spawn(
        self, slot: str, pool: Pool, incarnation: int, mitigations: Mitigations = NO_MITIGATIONS
    ) -> WorkerProcess:
        """Starts a worker process in a slot. Raises OSError if the operating system refuses."""
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
            **mitigations.options(pool.options),  # type: ignore[arg-type]  # checked at the start
        )
        settings_json = worker_settings().dump_json(settings).decode()
        environment = worker_environment(
            os.environ, pool.environment, self._kernels(slot), self._blas, mitigations
        )
        stderr = self._stderr(f"{slot}-{incarnation}.log")
        try:
            process = subprocess.Popen(
                [*self._command, "--settings", settings_json],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr.fileno(),
                env=environment,
                start_new_session=True,
            )
        except OSError:
            stderr.close()
            raise
        return WorkerProcess(process, settings_json, stderr, endpoint, crumb)

    def wipe_kernels(self, slot: str) -> None:
        """Removes the CUDA kernels that MLX has compiled and cached for the slot's workers; no
        worker may be running in the slot."""
        shutil.rmtree(self._kernels(slot), ignore_errors=True)

    def _kernels(self, slot: str) -> Path:
        folder = self._state_dir / "ptx" / slot
        try:
            make_folder(folder.parent)
            make_folder(folder)
        except OSError as error:  # a full disk: MLX does without
            self._note_once(
                f"compiled kernels cannot be kept, each worker compiles its own: {error.strerror}"
            )
        return folder

    def _stderr(self, name: str) -> StderrFile:
        try:
            return StderrFile(self._stderr_dir / name)
        except OSError as error:
            self._note_once(
                f"stderr of workers cannot be kept for records of their loss: {error.strerror}"
            )
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
        worker_settings().validate_python(given)
    except ValueError as error:
        raise StartError(f"model {pool.model_name}: {error}") from error


def _blas(note: Callable[[str], None]) -> str | None:
    blas = find_blas()
    note(f"workers compute with {blas} (LD_PRELOAD)" if blas else HOW_TO_GET_BLAS)
    return blas
