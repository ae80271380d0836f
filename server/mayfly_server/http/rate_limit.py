"""Rate limits of API keys: requests per minute, and requests at a time.

Each front end counts by itself: with n front ends, a key may send up to n times its limit.
"""

from __future__ import annotations

from dataclasses import dataclass

from mayfly_server.errors import RateLimited
from mayfly_server.http.api_keys import Key

_TRY_AGAIN_S = 1.0
"""Retry-After, in seconds, for a request beyond the number that a key may have at a time. It is a
guess, because nobody knows when one of the running requests will end."""


@dataclass(slots=True)
class Bucket:
    """A token bucket for the requests of one API key: it holds at most ``per_minute`` tokens, gains
    as many per minute, and each request takes one token. ``level`` is the number of tokens at the
    time ``filled_at``. Times are seconds on the caller's monotonic clock."""

    per_minute: int
    level: float
    filled_at: float

    def take(self, now: float) -> float:
        """Takes one token for a request and returns 0. If there is none, returns the seconds until
        there will be one."""
        filled = (now - self.filled_at) * self.per_minute / 60
        self.level = min(float(self.per_minute), self.level + filled)
        self.filled_at = now
        if self.level >= 1:
            self.level -= 1
            return 0.0
        return (1 - self.level) * 60 / self.per_minute


class Quotas:
    """The rate limits of all API keys: each key's number of running requests and its token
    bucket."""

    def __init__(self) -> None:
        self._running: dict[bytes, int] = {}
        self._buckets: dict[bytes, Bucket] = {}

    def enter(self, key: Key, now: float) -> None:
        """Counts a request that begins. Raises RateLimited if the key has reached a limit; the
        request is not counted then."""
        running = self._running.get(key.digest, 0)
        if key.concurrency is not None and running >= key.concurrency:
            raise RateLimited(
                f"This key may have {key.concurrency} requests at a time.",
                code="concurrency_limit_exceeded",
                retry_after_s=_TRY_AGAIN_S,
            )
        if key.requests_per_minute is not None:
            wait_s = self._bucket(key, key.requests_per_minute, now).take(now)
            if wait_s:
                raise RateLimited(
                    f"This key may send {key.requests_per_minute} requests a minute.",
                    retry_after_s=wait_s,
                )
        self._running[key.digest] = running + 1

    def leave(self, key: Key) -> None:
        """Counts the end of a request that :meth:`enter` has counted as begun."""
        left = self._running[key.digest] - 1
        if left:
            self._running[key.digest] = left
        else:
            del self._running[key.digest]

    def _bucket(self, key: Key, per_minute: int, now: float) -> Bucket:
        bucket = self._buckets.get(key.digest)
        if bucket is None or bucket.per_minute != per_minute:  # a new key or limit
            bucket = self._buckets[key.digest] = Bucket(per_minute, float(per_minute), now)
        return bucket
