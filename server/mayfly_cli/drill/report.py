"""From what clients saw and what was struck to numbers for people."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from mayfly_cli.drill.load import Stream

AFTER_S = 1.0
"""A worker may get some words out after it was struck: a stop of the stream that began so much
later is its doing."""
LONGER = 4.0
"""An interruption is so much longer than the stream's usual gap ..."""
AT_LEAST_S = 0.05
"""... and at least so long."""


@dataclass(frozen=True, slots=True)
class Strike:
    """``at`` and ``full_at`` are by the monotonic clock; ``full_at`` is None where the pool did
    not come back. ``continued`` counts the server's continuations, if it lets us see them."""

    signal: str
    slot: str
    pid: int
    at: float
    full_at: float | None
    continued: int | None

    @property
    def recovery_s(self) -> float | None:
        return None if self.full_at is None else self.full_at - self.at


@dataclass(frozen=True, slots=True)
class Struck:
    """What became of one strike."""

    strike: Strike
    interruptions: list[float]
    """Seconds, of the streams that it interrupted."""


@dataclass(frozen=True, slots=True)
class Report:
    """``reworded`` counts answers that are whole, but not those of the undisturbed run;
    ``unsent`` the signals that found no worker to strike."""

    requests: int
    failures: list[str]
    reworded: int
    strikes: list[Struck]
    unsent: int = 0

    @property
    def passed(self) -> bool:
        whole = all(struck.strike.full_at is not None for struck in self.strikes)
        return whole and not self.failures and not self.unsent

    def as_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "requests": self.requests,
            "failed": len(self.failures),
            "failures": self.failures,
            "reworded": self.reworded,
            "unsent": self.unsent,
            "strikes": [
                {
                    **asdict(struck.strike),
                    "recovery_s": struck.strike.recovery_s,
                    "interruptions_s": struck.interruptions,
                }
                for struck in self.strikes
            ],
        }

    def lines(self) -> list[str]:
        """For people."""
        lines = [_line(struck) for struck in self.strikes]
        every = [gap for struck in self.strikes for gap in struck.interruptions]
        continued = [s.strike.continued for s in self.strikes if s.strike.continued is not None]
        recoveries = [s.strike.recovery_s for s in self.strikes if s.strike.recovery_s is not None]
        known = f", {sum(continued)} continued" if len(continued) == len(self.strikes) else ""
        lines.append(f"requests               {self.requests}, {len(self.failures)} failed{known}")
        lines.append(f"interruption           {_mean_and_worst(every)}")
        lines.append(f"time to full capacity  {_mean_and_worst(recoveries)}")
        if self.reworded:
            lines.append(f"other wording          {self.reworded} answers, each of them whole")
        if self.unsent:
            lines.append(f"not sent               {self.unsent} signals")
        lines += [f"failed: {failure}" for failure in self.failures[:10]]
        return lines


def report(
    streams: Sequence[Stream],
    strikes: Sequence[Strike],
    texts: dict[int, str],
    *,
    unsent: int = 0,
) -> Report:
    """``texts`` are the undisturbed answers, by the number of the ask."""
    return Report(
        requests=len(streams),
        failures=[stream.error for stream in streams if stream.error is not None],
        reworded=sum(s.error is None and s.text != texts[s.ask] for s in streams),
        strikes=[Struck(strike, interruptions(streams, strike.at)) for strike in strikes],
        unsent=unsent,
    )


def interruptions(streams: Sequence[Stream], at: float) -> list[float]:
    """How long each stream that a strike interrupted stood still."""
    return [gap for stream in streams if (gap := _interruption(stream.at, at)) is not None]


def _interruption(times: Sequence[float], at: float) -> float | None:
    if not times or times[-1] <= at or times[0] >= at + AFTER_S:
        return None
    gaps = [(end - begin, begin, end) for begin, end in itertools.pairwise(times)]
    here = [gap for gap, begin, end in gaps if begin < at + AFTER_S and end > at]
    if not here:
        return None
    usual = median(gap for gap, _, _ in gaps)
    longest = max(here)
    return longest if longest > max(LONGER * usual, AT_LEAST_S) else None


def _line(struck: Struck) -> str:
    strike, gaps = struck.strike, struck.interruptions
    back = f"{strike.recovery_s:.1f} s" if strike.recovery_s is not None else "not in time"
    stood = f", {_mean_and_worst(gaps)}" if gaps else ""
    return (
        f"{strike.signal:<8} {strike.slot} (pid {strike.pid}): {len(gaps)} streams interrupted"
        f"{stood}; full capacity after {back}"
    )


def _mean_and_worst(values: Sequence[float]) -> str:
    if not values:
        return "none"
    return f"{fmean(values):.2f} s on average, {max(values):.2f} s at worst"
