"""Routing of requests to workers: weighted rendezvous hashing with bounded loads.

Every front end ranks the workers for a conversation in the same order, without exchanging messages
with other front ends: by a hash of (worker, conversation) (Thaler and Ravishankar, "A name-based
mapping scheme for rendezvous", 1996), weighted so that a worker which can run twice as many
requests is the first choice of twice as many conversations (Schindelhauer and Schomaker, "Weighted
distributed hash tables", 2005). The first worker in the ranking has the conversation's prefix in
its KV cache, so it is chosen unless its load exceeds 1.25 times its share, in proportion to its
capacity (Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded loads", 2016).
Otherwise the next worker in the ranking is considered.
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
    """A worker that could take the request.

    Attributes:
        name: the worker's name, equal on every front end and for the processes that replace it.
        load: the number of requests that run or wait on the worker.
        worker: the object by which the caller knows the worker.
        capacity: the number of requests that the worker can run together, at least 1.
    """

    name: str
    load: int
    worker: W
    capacity: int = 1


def choose(candidates: Iterable[Candidate[W]], key: bytes | None) -> Candidate[W] | None:
    """Chooses the worker for a request of the conversation ``key``: equal keys mostly lead to the
    same worker. If ``key`` is None, chooses the worker with the least load in proportion to its
    capacity. Returns None if there are no candidates."""
    ranking = sorted(candidates, key=lambda candidate: candidate.name)
    if not ranking:
        return None
    if key is None:
        return min(ranking, key=lambda candidate: candidate.load / candidate.capacity)
    ranking.sort(key=lambda candidate: _score(candidate, key), reverse=True)
    total = sum(candidate.load for candidate in ranking) + 1
    capacity = sum(candidate.capacity for candidate in ranking)
    # At least one candidate fits: not all of them can have more than their share of the load.
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
