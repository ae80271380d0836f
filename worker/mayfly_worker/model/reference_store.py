"""Store of reference results of a model on a type of device, shared by all workers of a machine.

A reference result is computed by the first worker of a model, for later workers to compare with or
to reuse: the tokens of test prompts, for instance. Each result is one small file in the machine's
state directory. The file's name is a hash of everything that decides the result, so that nothing
has to be removed when a model, a version or a device changes.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx
import structlog

DISTRIBUTIONS = ("mlx-mayfly", "mlx", "mlx-lm")


def versions() -> dict[str, str]:
    """Returns the versions of Mayfly, MLX and mlx-lm by distribution name; a distribution that is
    not installed (run from a source tree) is left out."""
    found = {}
    for name in DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ReferenceStore:
    """Results that the first worker of a model computed, stored for later workers to compare with
    or to reuse: the tokens of test prompts, for instance. ``digest`` identifies the model.

    Without a ``folder`` the results last as long as the process.
    """

    folder: Path | None
    digest: str
    in_memory: dict[str, Any]

    @classmethod
    def of(cls, folder: str, digest: str) -> ReferenceStore:
        return cls(Path(folder) if folder else None, digest, {})

    def known(self, question: object) -> Any | None:
        """Returns the stored result of the computation that ``question`` describes; None if no
        result is stored."""
        key = self._key(question)
        if key in self.in_memory or self.folder is None:
            return self.in_memory.get(key)
        try:
            return json.loads((self.folder / f"{key}.json").read_text("utf-8"))
        except (OSError, ValueError):
            return None  # never stored, or cut short by a full disk: stored anew

    def store(self, question: object, answer: Any) -> None:
        """Stores ``answer``, the JSON-compatible result of the computation that ``question``
        describes.

        A result that cannot be written to the disk is kept in memory for this process alone: a full
        disk does not keep a worker from serving.
        """
        key = self._key(question)
        self.in_memory[key] = answer
        if self.folder is None:
            return
        path = self.folder / f"{key}.json"
        scratch = path.with_suffix(f".{os.getpid()}")
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            scratch.touch(mode=0o600)
            scratch.write_text(json.dumps(answer), "utf-8")
            scratch.replace(path)
        except OSError as error:
            with suppress(OSError):
                scratch.unlink(missing_ok=True)  # each process would leave another file
            log.warning(
                "reference result cannot be stored: later workers compute it anew",
                file=str(path),
                reason=str(error),
            )

    def _key(self, question: object) -> str:
        """Returns a hash of the question, the model, the versions of the software that computes the
        answer, and the device; the hash names the file of the result."""
        info: dict[str, Any] = dict(mx.device_info())
        device = str(info.get("device_name") or info.get("architecture") or mx.default_device())
        blas = os.environ.get("LD_PRELOAD", "")
        parts = (question, self.digest, versions(), device, blas)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
