"""A cgroup with little memory, for tests of the kernel's OOM killer."""

from __future__ import annotations

import os
import time

import pytest

from mayfly_reaper.machine import cgroups


class SmallCgroup:
    """A cgroup (Linux) below the test process's own, with a memory limit. Skips the test on systems
    where no cgroup can be made."""

    def __init__(self) -> None:
        own = cgroups.own_cgroup()
        if own is None:
            pytest.skip("no cgroup with a memory controller")
        self._parent = own.folder
        self._limit = "memory.max" if own.version == 2 else "memory.limit_in_bytes"
        self.folder = own.folder / f"mayfly-test-{os.getpid()}"
        self.cgroup = cgroups.Cgroup(self.folder, own.version)
        try:
            self.folder.mkdir()
        except OSError:
            pytest.skip("cgroups can't be made here")
        if not (self.folder / self._limit).exists():
            self.folder.rmdir()
            pytest.skip("no memory controller for cgroups that are made here")

    def limit(self, size: int) -> None:
        (self.folder / self._limit).write_text(f"{size}\n")
        swap = self.folder / "memory.swap.max"
        if swap.exists():
            swap.write_text("0\n")

    def take(self, *pids: int, limit: int) -> None:
        """Moves processes into the cgroup, and so every process that these start later; sets the
        memory limit in bytes."""
        self.limit(limit)
        for pid in pids:
            (self.folder / "cgroup.procs").write_text(f"{pid}\n")

    def close(self) -> None:
        """Moves the remaining processes out of the cgroup, and removes it."""
        for pid in (self.folder / "cgroup.procs").read_text().split():
            (self._parent / "cgroup.procs").write_text(f"{pid}\n")
        deadline = time.monotonic() + 5
        while True:
            try:
                self.folder.rmdir()
            except OSError:
                assert time.monotonic() < deadline, "processes that died are still in it"
                time.sleep(0.01)
            else:
                return
