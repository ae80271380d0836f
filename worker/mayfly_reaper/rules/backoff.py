"""Pauses before a failed operation is tried again."""

from __future__ import annotations


def backoff_s(failures: int, first_s: float, longest_s: float, draw: float) -> float:
    """Returns the seconds to wait after a number of failures in a row (1 or more).

    Exponential with "equal jitter" (M. Brooker, "Exponential Backoff And Jitter", 2015): half of
    the pause is certain, so that no loop runs hot, half is random, so that many processes do not
    run in step.

    Args:
        first_s: upper bound of the pause after one failure; each further failure doubles it.
        longest_s: the largest upper bound.
        draw: a random number, uniform in [0, 1).
    """
    bound = min(longest_s, first_s * 2.0 ** min(failures - 1, 30))
    return bound * (1 + draw) / 2
