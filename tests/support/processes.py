"""Tells tests whether a process runs."""

from __future__ import annotations

import psutil


def alive(process: psutil.Process) -> bool:
    """Returns True if the process runs; False if it has ended or is a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
