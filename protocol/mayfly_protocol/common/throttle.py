"""Limits on how often the same text is logged."""

from __future__ import annotations

import time
from collections.abc import Callable

QUIET_S = 60.0
"""Seconds for which a logged text is not logged again."""
REMEMBERED = 1000
"""Largest number of different texts that are logged within the pause before a text may be logged
again; any further text is dropped, so that a flood of texts cannot fill the disk."""


class LogThrottle:
    """Logs a text at once, and logs it again only after a pause, with the number of repetitions
    that were left out.

    Args:
        log: writes a text to the log.
        clock: returns the time in seconds.
        quiet_s: seconds for which an equal text is not logged again; infinity logs each text once.
    """

    def __init__(
        self,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        quiet_s: float = QUIET_S,
    ) -> None:
        self._log = log
        self._clock = clock
        self._quiet_s = quiet_s
        self._logged: dict[str, tuple[float, int]] = {}
        self._forgot_at = clock()

    def __call__(self, text: str, detail: str = "") -> None:
        """Logs ``text: detail``. A call with a ``text`` that was logged before is a repetition,
        whatever its ``detail``."""
        now = self._clock()
        logged_at, held_back = self._logged.get(text, (-self._quiet_s, 0))
        if now - logged_at < self._quiet_s:
            self._logged[text] = (logged_at, held_back + 1)
            return
        if len(self._logged) >= REMEMBERED and now - self._forgot_at >= 1.0:
            self._forgot_at = now
            self._logged = {
                key: old for key, old in self._logged.items() if now - old[0] < self._quiet_s
            }
        if len(self._logged) >= REMEMBERED:
            return  # a flood of different texts must not fill the disk
        self._logged[text] = (now, 0)
        again = f" ({held_back} more times since it was last logged)" if held_back else ""
        self._log(f"{text}{': ' if detail else ''}{detail}{again}")
