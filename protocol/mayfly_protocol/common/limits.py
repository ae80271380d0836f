"""The limit of open files of a process; every connection is one."""

from __future__ import annotations

import resource
import sys

MOST = 65536
MOST_MACOS = 10240  # the most that its kernel grants to a process without a limit


def raise_open_file_limit() -> int:
    """Raises the limit of open files as far as the system allows, for this process and those that
    it starts (shells often begin at 1024, macOS at 256). Returns the new limit."""
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
