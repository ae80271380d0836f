"""Histograms that count measurements in buckets, as in Prometheus.

::

    bounds          0.1    0.5    1.0
    counts       3   |  9   |  2   |  1       one more than bounds: the last bucket is unbounded
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import zip_longest

STEP_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
"""Upper bounds, in seconds, of the histogram buckets for the duration of a forward pass."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram without its bucket bounds. A measurement is counted in the first bucket whose
    upper bound it does not exceed; ``counts`` has one number per bucket and may be empty before the
    first measurement. ``sum`` is the sum of all measurements."""

    counts: tuple[int, ...] = ()
    sum: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def plus(self, other: Distribution) -> Distribution:
        """Returns the sum of two histograms with the same bucket bounds."""
        pairs = zip_longest(self.counts, other.counts, fillvalue=0)
        return Distribution(tuple(a + b for a, b in pairs), self.sum + other.sum)

    def observed(self, value: float, bounds: tuple[float, ...]) -> Distribution:
        """Returns the histogram with the measurement ``value`` added."""
        counts = list(self.counts or (0,) * (len(bounds) + 1))
        counts[bisect_left(bounds, value)] += 1
        return Distribution(tuple(counts), self.sum + value)


NOTHING = Distribution()
