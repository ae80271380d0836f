"""Keeps a Mac from falling asleep while it serves.

``caffeinate`` comes with macOS. Other systems do not sleep by themselves while they serve. The
tests check how ``caffeinate`` is started and ended, not that a Mac stays awake.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def command(platform: str, pid: int) -> tuple[str, ...] | None:
    """Returns the command that keeps the machine awake while the process ``pid`` runs; None on
    systems that need none. The command holds off idle sleep, of the system and of the disk, and
    ends with the process. ``platform`` is as in ``sys.platform``."""
    return ("caffeinate", "-i", "-m", "-w", str(pid)) if platform == "darwin" else None


@contextmanager
def awake(note: Callable[[str], None]) -> Iterator[None]:
    """Keeps the machine awake inside a ``with`` block; if this fails, ``note`` is called with the
    reason."""
    arguments = command(sys.platform, os.getpid())
    process = None
    if arguments is not None:
        try:
            process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            note(
                f"cannot start caffeinate, so this machine may fall asleep while it serves: {error}"
            )
    try:
        yield
    finally:
        if process is not None:
            process.terminate()
            process.wait()
