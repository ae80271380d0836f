"""Which worker gets a request: rendezvous hashing with bounded loads.

Every front end ranks the workers of a conversation in the same order, without having spoken to
the others: by a hash of (worker, conversation) (Thaler and Ravishankar, "A name-based mapping
scheme for rendezvous", 1996). The first of the ranking holds the conversation's prefix in its
cache, so it is taken unless it has more than 1.25 times its share of the load (Mirrokni, Thorup
and Zadimoghaddam, "Consistent hashing with bounded loads", 2016); then the next one is.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

W = TypeVar("W")

LOAD_BOUND = 1.25


@dataclass(frozen=True, slots=True)
class Candidate(Generic[W]):
    """A worker that could take the request. ``name`` is the same on every front end and for
    every incarnation of the slot; ``load`` counts the requests it has, running and waiting."""

    name: str
    load: int
    worker: W


def choose(candidates: Iterable[Candidate[W]], key: bytes | None) -> Candidate[W] | None:
    """The best of the candidates for a conversation, or the least loaded where there is none
    (``key`` None). None if there are no candidates."""
    ranking = sorted(candidates, key=lambda candidate: candidate.name)
    if not ranking:
        return None
    if key is None:
        return min(ranking, key=lambda candidate: candidate.load)
    ranking.sort(key=lambda candidate: _weight(candidate.name, key), reverse=True)
    total = sum(candidate.load for candidate in ranking) + 1
    share = math.ceil(LOAD_BOUND * total / len(ranking))
    # There always is one: not all of them can have more than the average.
    return next(candidate for candidate in ranking if candidate.load < share)


def _weight(name: str, key: bytes) -> bytes:
    return hashlib.blake2b(name.encode(), key=key[:64], digest_size=8).digest()
