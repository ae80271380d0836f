"""Sums of counters that only grow: over workers in a node, over nodes in a front end."""

from __future__ import annotations

import pickle
import sys
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Counter as PrometheusCounter

from mayfly_reaper.metrics import RefusalTotals
from mayfly_server.metrics import RefusalCounts

reasons = st.sampled_from(["untrusted", "handshake", "revoked", "nonsense", "version"])
counts = st.dictionaries(reasons, st.integers(0, 9))


@given(counts, st.lists(st.tuples(st.integers(1, 3), reasons), max_size=20), st.integers(0, 20))
def test_a_node_counts_for_its_workers_whatever_became_of_them(
    own: dict[str, int], refused: list[tuple[int, str]], ends: int
) -> None:
    """Half-way, all workers end and others take their places."""
    tally = RefusalTotals(own)
    workers: dict[int, Counter[str]] = {}
    for at, (place, reason) in enumerate(refused):
        if at == ends:
            for each in (1, 2, 3):
                tally.end(each)
        incarnation = place + 3 * (at >= ends)
        worker = workers.setdefault(incarnation, Counter())
        earlier = dict(worker)
        worker[reason] += 1
        tally.report(incarnation, worker)
        tally.report(incarnation, earlier)  # a beat that came late
    expected = Counter(own) + Counter(reason for _, reason in refused)
    assert Counter(tally.total()) == expected


def test_a_node_keeps_nothing_of_each_worker_that_is_gone() -> None:
    tally = RefusalTotals({})
    tally.report(1, {"nonsense": 2})
    tally.end(1)
    before = sys.getsizeof(pickle.dumps(tally))
    for incarnation in range(2, 1000):
        tally.report(incarnation, {"nonsense": 2})
        tally.end(incarnation)
    assert sys.getsizeof(pickle.dumps(tally)) <= before + 8
    assert tally.total() == {"nonsense": 2 * 999}


def counter() -> tuple[PrometheusCounter, CollectorRegistry]:
    registry = CollectorRegistry()
    return PrometheusCounter("refusals", "", ["by", "reason"], registry=registry), registry


@given(st.lists(st.tuples(st.integers(0, 2), reasons), max_size=20))
def test_a_front_end_counts_each_refusal_once(refused: list[tuple[int, str]]) -> None:
    """Told again and again, by several nodes, one of which is started anew in between."""
    made, registry = counter()
    taken = RefusalCounts(made)
    totals: dict[int, Counter[str]] = {}
    for node, reason in refused:
        totals.setdefault(node, Counter())[reason] += 1
        for _ in range(2):
            taken.take(f"node {node}", "an epoch", totals[node])
    taken.take("node 0", "another epoch", {"nonsense": 1})
    for node, total in totals.items():
        for reason, count in total.items():
            labels = {"by": f"node {node}", "reason": reason}
            more = int(node == 0 and reason == "nonsense")
            assert registry.get_sample_value("refusals_total", labels) == count + more


def test_what_a_node_makes_up_is_no_label() -> None:
    made, registry = counter()
    RefusalCounts(made).take("node", "e", {"because-17": 2})
    value = registry.get_sample_value("refusals_total", {"by": "node", "reason": "other"})
    assert value == 2
