"""How long to wait before trying again what has just failed."""

from __future__ import annotations


def delay(failures: int, first: float, longest: float, draw: float) -> float:
    """Seconds to wait after so many failures in a row (1 or more).

    Exponential with "equal jitter" (M. Brooker, "Exponential Backoff And Jitter", 2015): half of
    it is certain, so that no loop runs hot, half is drawn, so that many do not run in step.

    Args:
        first: the bound after one failure; doubled by each further one ...
        longest: ... up to this.
        draw: uniform in [0, 1).
    """
    bound = min(longest, first * 2.0 ** min(failures - 1, 30))
    return bound * (1 + draw) / 2
