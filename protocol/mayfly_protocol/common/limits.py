"""Limit on the number of open files of a process; every network connection takes one."""

from __future__ import annotations

import resource
import sys

MOST = 65536
MOST_MACOS = 10240  # the most that the macOS kernel grants, even without a hard limit


def raise_open_file_limit() -> int:
    """Raises the limit on open files as far as the system allows, for this process and the
    processes that it starts (shells often begin with 1024, macOS with 256). Returns the new
    limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    for most in (MOST, MOST_MACOS):
        wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
        if soft >= wanted:
            return soft
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError):
            continue
        return wanted
    return soft
