"""The last autopsies in short, as rosters tell them: with ages, for there are no clocks on the
wire."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from mayfly_protocol.roster import Autopsy
from mayfly_reaper.autopsy import records

KEPT = 8
"""Of the last ones of a node."""
CAUSE = 300
"""Characters."""

_AUTOPSY = TypeAdapter(Autopsy)


def brief(record: dict[str, Any], age_s: float = 0.0) -> Autopsy:
    """What a roster says of a record. Raises KeyError, TypeError or ValueError for one that is not
    whole, or not of the types that a roster may have: front ends would refuse all of the roster."""
    cause = first_line(str(record["first_cause"]["text"]))
    return _AUTOPSY.validate_python({**record, "first_cause": cause, "age_s": age_s})


def kept(path: Path, now: datetime) -> Iterator[Autopsy]:
    """The last records in a file, the oldest first. Those that another version wrote differently
    are left out. Raises OSError where there is a file that cannot be read."""
    for record in deque(records(path), maxlen=KEPT):
        try:
            written = datetime.fromisoformat(record["time"])
            found = brief(record, max(0.0, (now - written).total_seconds()))
        except (KeyError, TypeError, ValueError):
            continue
        yield found


def first_line(text: str) -> str:
    """One line is enough for a list."""
    return text.partition("\n")[0][:CAUSE]
