"""Routing of requests to workers: weighted rendezvous hashing with bounded loads.

Every front end ranks the workers of a conversation in the same order, without having spoken to
the others: by a hash of (worker, conversation) (Thaler and Ravishankar, "A name-based mapping
scheme for rendezvous", 1996), weighted so that a worker which can run twice as many requests is
the first choice of twice as many conversations (Schindelhauer and Schomaker, "Weighted distributed
hash tables", 2005). The first of the ranking holds the conversation's prefix in its cache, so it is
taken unless it has more than 1.25 times its share of the load, by what it can run (Mirrokni, Thorup
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
    every incarnation of the slot; ``load`` counts the requests it has, running and waiting, and
    ``capacity``, which is more than 0, those that it can run together."""

    name: str
    load: int
    worker: W
    capacity: int = 1


def choose(candidates: Iterable[Candidate[W]], key: bytes | None) -> Candidate[W] | None:
    """Chooses the best candidate for a conversation; the least loaded one if ``key`` is None.
    Returns None if there are no candidates."""
    ranking = sorted(candidates, key=lambda candidate: candidate.name)
    if not ranking:
        return None
    if key is None:
        return min(ranking, key=lambda candidate: candidate.load / candidate.capacity)
    ranking.sort(key=lambda candidate: _score(candidate, key), reverse=True)
    total = sum(candidate.load for candidate in ranking) + 1
    capacity = sum(candidate.capacity for candidate in ranking)
    # There always is such a candidate: not all of them can have more than their share.
    return next(
        candidate
        for candidate in ranking
        if candidate.load < math.ceil(LOAD_BOUND * total * candidate.capacity / capacity)
    )


def _score(candidate: Candidate[W], key: bytes) -> float:
    """A candidate's score for a conversation, distributed so that each of several candidates has
    the highest one with a probability in proportion to its capacity."""
    digest = hashlib.blake2b(candidate.name.encode(), key=key[:64], digest_size=8).digest()
    uniform = ((int.from_bytes(digest) >> 11) + 0.5) / 2**53
    return -candidate.capacity / math.log(uniform)
