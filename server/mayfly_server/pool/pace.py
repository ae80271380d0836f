"""How fast workers write, from what they say they have written so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from typing import TypeVar

Who = TypeVar("Who", bound=Hashable)

WINDOW_S = 3.0
"""Workers say every half second how far they are: within one, a rate would be noise."""
SHORTEST_S = 0.9


class Pace:
    """Rates over the last :data:`WINDOW_S` seconds. Times are on the caller's monotonic clock."""

    def __init__(self) -> None:
        self._heard: dict[Hashable, deque[tuple[float, int]]] = {}

    def hear(self, totals: Mapping[Who, int], now: float) -> dict[Who, float | None]:
        """Takes in how many tokens each one has written since it began, and returns tokens per
        second; None for one that has not been heard for long enough. Who is not named is
        forgotten."""
        self._heard = {who: self._heard.get(who, deque()) for who in totals}
        rates: dict[Who, float | None] = {}
        for who, total in totals.items():
            heard = self._heard[who]
            heard.append((now, total))
            while len(heard) > 2 and heard[1][0] <= now - WINDOW_S:
                heard.popleft()
            began, before = heard[0]
            elapsed = now - began
            rates[who] = (total - before) / elapsed if elapsed >= SHORTEST_S else None
        return rates
