"""Room on a disk, and one writer at a time."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mayfly_worker.fetch.errors import FetchError


def require(folder: Path, size: int) -> None:
    """Returns if the disk under ``folder`` (which may not exist yet) has ``size`` bytes free.

    Raises:
        FetchError: it has not.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < size:
        raise FetchError(
            f"Not enough room on the disk of {folder}: {in_units(size)} are needed and "
            f"{in_units(free)} are free."
        )


def in_units(size: int) -> str:
    """Bytes for people: "1.2 GB"."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Holds a lock file; waits while another process does. It ends with the process, so a fetch
    that was killed blocks nobody."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
