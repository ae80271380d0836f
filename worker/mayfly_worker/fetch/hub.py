"""Fetches a model from a Hugging Face repository, into the Hub client's shared cache.

A cached model is used as it is, without asking the Hub: a server must start while the network is
down, and all workers must load the same weights. (To get a newer revision, delete the old one: ``hf
cache rm``.) The client library honours ``HF_HOME``, ``HF_HUB_OFFLINE``, ``HF_TOKEN`` and
``HF_ENDPOINT``; a download that was cut short goes on after the files that are complete.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub as hub
from huggingface_hub import constants, errors
from huggingface_hub.utils import filter_repo_objects
from tqdm import tqdm  # type: ignore[import-untyped]

from mayfly_worker.fetch import model_folder
from mayfly_worker.fetch.reporting import FetchError, Report
from mayfly_worker.model.weight_files import WEIGHTS

PATTERNS = [
    "*.json",
    "model*.safetensors",
    "*.py",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jsonl",
    "*.jinja",
]
"""Files of a repository that mlx-lm reads (``mlx_lm.utils.DEFAULT_ALLOW_PATTERNS``, copied because
importing it needs MLX)."""


def fetch(repository: str, report: Report) -> Path:
    """Returns the folder of a repository's default revision, downloaded if it is not in the cache.

    Raises:
        FetchError: there is no such repository, or this user may not see it; the Hub cannot be
            reached; there is no room on the disk; or the repository holds no model that MLX can
            load.
    """
    try:
        path = _cached(repository) or _download(repository, report)
    except FetchError:
        raise
    except Exception as error:
        # The library passes on its HTTP client's exceptions, and has changed that client twice.
        raise FetchError(explain(repository, error)) from error
    model_folder.check(path)
    return path


def find(repository: str) -> Path:
    """Returns the folder of a repository in the Hub client's cache; nothing is downloaded.

    Raises:
        FetchError: the model is not in the cache, or not all of it.
    """
    try:
        path = _snapshot(repository)
    except errors.LocalEntryNotFoundError as error:
        raise FetchError(
            f"There is no folder {repository} here, and no such model in the cache at "
            f"{constants.HF_HUB_CACHE}. If the Hub has it, `hf download {repository}` fetches it, "
            f"as `mayfly serve {repository}` does."
        ) from error
    except errors.HFValidationError as error:
        raise FetchError(explain(repository, error)) from error
    model_folder.check(path)
    return path


def _snapshot(repository: str) -> Path:
    """Returns the folder of a repository in the Hub client's cache, which may lack files."""
    return Path(hub.snapshot_download(repository, allow_patterns=PATTERNS, local_files_only=True))


def _cached(repository: str) -> Path | None:
    """Returns the folder of a repository in the Hub client's cache; None if files are missing."""
    try:
        path = _snapshot(repository)
        model_folder.check(path)
    except (errors.LocalEntryNotFoundError, FetchError):
        if constants.HF_HUB_OFFLINE:
            raise
        return None
    return path


def _download(repository: str, report: Report) -> Path:
    report("download", 0, 0)
    files = _files(repository)
    if not any(Path(name).match(WEIGHTS) for name in files):
        raise FetchError(
            f"{repository} has no weights that MLX can load (no file is named "
            f"{WEIGHTS}). Look for a conversion of it, for instance under "
            "mlx-community."
        )
    missing = [size for name, size in files.items() if not _is_cached(repository, name)]
    total, left = sum(files.values()), sum(missing)
    model_folder.require_room(Path(constants.HF_HUB_CACHE), left)
    # Exiting by an exception would wait for the downloading threads, whose files are kept anyhow.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    bars = _bar_class(lambda n: report("download", min(total - left + n, total), total))
    return Path(hub.snapshot_download(repository, allow_patterns=PATTERNS, tqdm_class=bars))


def _files(repository: str) -> dict[str, int]:
    """Asks the Hub for the files of a repository that mlx-lm reads; returns their names and their
    sizes in bytes."""
    info = hub.HfApi().model_info(repository, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings}
    return {name: sizes[name] for name in filter_repo_objects(sizes, allow_patterns=PATTERNS)}


def _is_cached(repository: str, name: str) -> bool:
    return isinstance(hub.try_to_load_from_cache(repository, name), str)


def _bar_class(report: Callable[[int], None]) -> type[Any]:
    """Makes a progress bar class for the Hub client that shows nothing and reports the bytes done.

    The client may count the same bytes on two bars, as they come over the network and as they reach
    the disk: ``report`` gets the count of the bar that is ahead.
    """
    byte_bars: list[Any] = []
    silence = Path(os.devnull).open("w")  # noqa: SIM115 (as long as the process)
    lock = threading.Lock()

    class ByteBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "file": silence, "disable": False})
            if options.get("unit") == "B":
                byte_bars.append(self)

        def update(self, n: float | None = 1) -> None:
            with lock:
                super().update(n)
                if self in byte_bars:
                    report(int(max(bar.n for bar in byte_bars)))

    return ByteBar


def explain(repository: str, error: Exception) -> str:
    """Returns a text that explains an error of the Hub client to the person who named the
    repository."""
    match error:
        case errors.HFValidationError():
            return (
                f"{repository!r} is neither a folder here nor the id of a Hugging Face repository "
                "(owner/name)."
            )
        case errors.GatedRepoError():
            return (
                f"{repository} is gated: ask for access on its page on the Hub, then log in with "
                "`hf auth login` or set HF_TOKEN."
            )
        case errors.RepositoryNotFoundError():
            return (
                f"There is no folder {repository} here, and on the Hub no such repository that "
                "you can see. If it is private, log in with `hf auth login` or set HF_TOKEN."
            )
        case errors.LocalEntryNotFoundError() if constants.HF_HUB_OFFLINE:
            return (
                f"{repository} is not, or not wholly, in the cache at {constants.HF_HUB_CACHE}, "
                "and HF_HUB_OFFLINE forbids to download it."
            )
        case _:
            first = str(error).strip().split("\n")[0] or type(error).__name__
            return (
                f"There is no folder {repository} here, and it could not be downloaded from the "
                f"Hub: {first}"
            )
