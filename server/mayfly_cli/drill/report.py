"""The report of a drill, which sends signals to workers while clients stream: it is made from the
records of the streams and of the signals."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from mayfly_cli.drill.load import CompletionStream

AFTER_S = 1.0
"""Seconds after a signal in which a gap in a stream may begin to be blamed on the signal: a worker
may still send some tokens after the signal."""
LONGER = 4.0
"""A gap between two chunks counts as an interruption if it is longer than this multiple of the
stream's median gap, and longer than :data:`AT_LEAST_S` seconds."""
AT_LEAST_S = 0.05
"""Gaps of fewer seconds between two chunks do not count as interruptions."""


@dataclass(frozen=True, slots=True)
class SentSignal:
    """A signal that the drill sent to a worker.

    Attributes:
        at: the time of the signal, in seconds on the monotonic clock.
        full_at: the time at which all workers were ready again; None if they were not ready in
            time.
        continued: the number of requests that another worker continued after the signal; None if
            the server's metrics are not readable.
    """

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
    """A signal that the drill sent to a worker, and the length in seconds of each interruption of a
    stream that the signal caused."""

    sent: SentSignal
    interruptions: list[float]


@dataclass(frozen=True, slots=True)
class DrillReport:
    """The result of a drill, which sends signals to workers while clients stream.

    Attributes:
        requests: the number of requests that the clients sent.
        failures: the reason of each failed request.
        reworded: the number of complete answers whose text differs from the answer to the same
            request before the first signal.
        unsent: the number of planned signals that were not sent.
    """

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
        """Returns the report as lines of text."""
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
    """Makes the report of a drill. ``texts`` are the texts of the answers from before the first
    signal, by the index of the request's body; ``unsent`` is the number of planned signals that
    were not sent."""
    return DrillReport(
        requests=len(streams),
        failures=[stream.error for stream in streams if stream.error is not None],
        reworded=sum(s.error is None and s.text != texts[s.request] for s in streams),
        effects=[SignalEffect(sent, interruptions(streams, sent.at)) for sent in signals],
        unsent=unsent,
    )


def interruptions(streams: Sequence[CompletionStream], at: float) -> list[float]:
    """Returns the length in seconds of the interruption in each stream that a signal at the time
    ``at`` interrupted."""
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
