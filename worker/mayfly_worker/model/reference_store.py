"""What a model was found to do on a kind of device, kept for the workers after the first one.

One small file for each question, in the node's state directory. Its name is a hash of all that
decides the answer, so that nothing has to be removed when a model, a version or a device changes.

What a worker is made of.
"""

from __future__ import annotations

import contextlib
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
    """By distribution; one that runs from a source tree has no version, and is left out."""
    found = {}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ReferenceStore:
    """Of the model with this digest. Without a ``folder`` they last as long as the process."""

    folder: Path | None
    digest: str
    heard: dict[str, Any]

    @classmethod
    def of(cls, folder: str, digest: str) -> ReferenceStore:
        return cls(Path(folder) if folder else None, digest, {})

    def known(self, question: object) -> Any | None:
        """The answer that was stored; None if there is none."""
        key = self._key(question)
        if key in self.heard or self.folder is None:
            return self.heard.get(key)
        try:
            return json.loads((self.folder / f"{key}.json").read_text("utf-8"))
        except (OSError, ValueError):
            return None  # never stored, or cut short by a full disk: it is stored anew

    def store(self, question: object, answer: Any) -> None:
        """``answer`` is made of what JSON knows. Where it cannot be written it lasts as long as the
        process: a full disk keeps no worker from serving."""
        key = self._key(question)
        self.heard[key] = answer
        if self.folder is None:
            return
        path = self.folder / f"{key}.json"
        scratch = path.with_suffix(f".{os.getpid()}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            scratch.write_text(json.dumps(answer), "utf-8")
            scratch.replace(path)
        except OSError as error:
            with suppress(OSError):
                scratch.unlink(missing_ok=True)  # each process would leave another one
            log.warning("a reference cannot be kept", file=str(path), reason=str(error))

    def _key(self, question: object) -> str:
        """What decides the right answer: the question, the model, who computes it, and on what."""
        info: dict[str, Any] = dict(mx.device_info())
        device = str(info.get("device_name") or info.get("architecture") or mx.default_device())
        blas = os.environ.get("LD_PRELOAD", "")
        parts = (question, self.digest, versions(), device, blas)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
