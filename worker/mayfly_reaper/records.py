"""Keeping what is known of lost workers: in the autopsies' file, for good, and in rosters, the last
of them. A disk that is full costs the file its record and nobody else anything."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

from mayfly_reaper import autopsy, briefs
from mayfly_reaper.actions import Record
from mayfly_reaper.roster import Bulletin
from mayfly_reaper.settings import About
from mayfly_reaper.telling import Once, Teller


class Records:
    """``epoch`` is the reaper's; what reapers before it wrote is told on at once."""

    def __init__(self, path: Path, epoch: str, observer: Teller, bulletin: Bulletin) -> None:
        self._path = path
        self._epoch = epoch
        self._observer = observer
        self._complain = Once(observer.note)
        self._bulletin = bulletin
        try:
            for each in briefs.kept(path, datetime.now(UTC)):
                bulletin.record(each, time.monotonic())
        except OSError as error:
            self._complain(f"autopsies cannot be read: {error}")

    def add(self, slot: str, model: str, record: Record) -> None:
        life = record.life
        lost = f"{slot}: lost worker {life.number} (pid {life.pid}): {record.verdict.text}"
        self._observer.note(f"{lost}; {record.done}", About(slot, life.number, bad=True))
        written = autopsy.autopsy(
            record,
            slot=slot,
            model=model,
            epoch=self._epoch,
            time=datetime.now(UTC),
            now=time.monotonic(),
        )
        try:
            autopsy.append(self._path, written)
        except OSError as error:
            self._complain(f"autopsies cannot be written: {error}")
        self._bulletin.record(briefs.brief(written), time.monotonic())
