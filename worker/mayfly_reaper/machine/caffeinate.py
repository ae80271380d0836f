"""Keeping a Mac from falling asleep while it serves.

``caffeinate`` comes with macOS. Elsewhere nothing sleeps by itself that serves. What it is started
with has been tested, that it works has not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def command(platform: str, pid: int) -> tuple[str, ...] | None:
    """What to run beside the process ``pid`` on a platform as ``sys.platform`` has it; None if
    nothing. It holds off idle sleep, of the system and of the disk, and ends with the process."""
    return ("caffeinate", "-i", "-m", "-w", str(pid)) if platform == "darwin" else None


@contextmanager
def awake(note: Callable[[str], None]) -> Iterator[None]:
    """Holds the machine awake while it is entered. Where that can't be, ``note`` is told."""
    arguments = command(sys.platform, os.getpid())
    process = None
    if arguments is not None:
        try:
            process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            note(f"this machine may fall asleep while it serves: {error}")
    try:
        yield
    finally:
        if process is not None:
            process.terminate()
            process.wait()
