"""States of processes that tests watch."""

from __future__ import annotations

import psutil


def alive(process: psutil.Process) -> bool:
    """Returns True if a process runs (a zombie does not)."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
