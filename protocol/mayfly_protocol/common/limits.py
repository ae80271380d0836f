"""How many files a process may have open. Every connection is one."""

from __future__ import annotations

import resource
import sys

MOST = 65536
MOST_MACOS = 10240  # what its kernel grants at most to a process that asks for "unlimited"


def raise_limit() -> int:
    """Lets this process, and those that it will start, have as many open files as the system
    grants (shells often begin at 1024, macOS at 256). Returns how many those are."""
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
