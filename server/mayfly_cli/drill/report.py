"""The report of a drill: from the clients' records and the sent signals."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from mayfly_cli.drill.load import CompletionStream

AFTER_S = 1.0
"""Time after a signal in which a gap that begins is attributed to the signal: a worker may still
send some tokens after it."""
LONGER = 4.0
"""Shortest interruption, as a multiple of the stream's usual gap."""
AT_LEAST_S = 0.05
"""Shortest interruption in seconds."""


@dataclass(frozen=True, slots=True)
class SentSignal:
    """A signal that was sent to a worker. ``at`` and ``full_at`` are by the monotonic clock;
    ``full_at``, when all workers were ready again, is None if they never were. ``continued`` counts
    the server's continuations; None if its metrics are not readable."""

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
class SignalEffect:
    """A signal and the interruptions of streams, in seconds, that it caused."""

    sent: SentSignal
    interruptions: list[float]


@dataclass(frozen=True, slots=True)
class DrillReport:
    """The result of a drill. ``reworded`` counts complete answers that differ from those of the
    undisturbed run, ``unsent`` the signals for which there was no worker."""

    requests: int
    failures: list[str]
    reworded: int
    effects: list[SignalEffect]
    unsent: int = 0

    @property
    def passed(self) -> bool:
        recovered = all(effect.sent.full_at is not None for effect in self.effects)
        return recovered and not self.failures and not self.unsent

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
                    **asdict(effect.sent),
                    "recovery_s": effect.sent.recovery_s,
                    "interruptions_s": effect.interruptions,
                }
                for effect in self.effects
            ],
        }

    def lines(self) -> list[str]:
        """Writes the report as text."""
        signals = [effect.sent for effect in self.effects]
        lines = [_line(effect) for effect in self.effects]
        every = [gap for effect in self.effects for gap in effect.interruptions]
        continued = [sent.continued for sent in signals if sent.continued is not None]
        recoveries = [sent.recovery_s for sent in signals if sent.recovery_s is not None]
        known = f", {sum(continued)} continued" if len(continued) == len(signals) else ""
        lines.append(f"requests               {self.requests}, {len(self.failures)} failed{known}")
        lines.append(f"interruption           {_mean_and_worst(every)}")
        lines.append(f"time to full capacity  {_mean_and_worst(recoveries)}")
        if self.reworded:
            lines.append(f"other wording          {self.reworded} answers, each of them complete")
        if self.unsent:
            lines.append(f"not sent               {self.unsent} signals")
        lines += [f"failed: {failure}" for failure in self.failures[:10]]
        return lines


def make_report(
    streams: Sequence[CompletionStream],
    signals: Sequence[SentSignal],
    texts: dict[int, str],
    *,
    unsent: int = 0,
) -> DrillReport:
    """Makes the report. ``texts`` are the undisturbed answers by the index of the request."""
    return DrillReport(
        requests=len(streams),
        failures=[stream.error for stream in streams if stream.error is not None],
        reworded=sum(s.error is None and s.text != texts[s.request] for s in streams),
        effects=[SignalEffect(sent, interruptions(streams, sent.at)) for sent in signals],
        unsent=unsent,
    )


def interruptions(streams: Sequence[CompletionStream], at: float) -> list[float]:
    """Returns the length of the gap in each stream that a signal at this time interrupted."""
    gaps = (_interruption(stream.chunk_times, at) for stream in streams)
    return [gap for gap in gaps if gap is not None]


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


def _line(effect: SignalEffect) -> str:
    sent, gaps = effect.sent, effect.interruptions
    recovery = f"{sent.recovery_s:.1f} s" if sent.recovery_s is not None else "not in time"
    lengths = f", {_mean_and_worst(gaps)}" if gaps else ""
    return (
        f"{sent.signal:<8} {sent.slot} (pid {sent.pid}): {len(gaps)} streams interrupted"
        f"{lengths}; full capacity after {recovery}"
    )


def _mean_and_worst(values: Sequence[float]) -> str:
    if not values:
        return "none"
    return f"{fmean(values):.2f} s on average, {max(values):.2f} s at worst"
