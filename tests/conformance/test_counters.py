"""Counters of a whole server while its workers are killed and replaced."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from support.server import Server, serving, wait_for

Sample = tuple[str, str]


def counters(server: Server) -> dict[Sample, float]:
    """Returns all samples that may only grow: counters, and histograms' buckets and counts. A page
    that could not wait for its node's part is left out."""

    def whole() -> str | None:
        page = server.http.get("/metrics").text
        return page if "mayfly_worker_starts_total{" in page else None

    page = wait_for(whole, "the counters of the node")
    return {
        (sample.name, str(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        if family.type in ("counter", "histogram")
        for sample in family.samples
    }


def total(found: dict[Sample, float], name: str, label: str = "") -> float:
    return sum(value for (each, labels), value in found.items() if each == name and label in labels)


@contextmanager
def asked_all_the_while(server: Server) -> Iterator[None]:
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            server.chat(max_tokens=200)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_no_counter_falls_at_a_death(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, tmp_path, "--workers", "2") as server, asked_all_the_while(server):
        seen = counters(server)

        def grown() -> dict[Sample, float]:
            """The counters now; none is smaller than it was when this was last asked."""
            nonlocal seen
            now = counters(server)
            fallen = {sample for sample in seen if now.get(sample, -1.0) < seen[sample]}
            assert not fallen
            seen = now
            return now

        name = "mayfly_worker_generated_tokens_total"
        wait_for(lambda: total(grown(), name) > 200, "tokens of the first workers")
        for killed in range(1, 3):
            busy = wait_for(lambda: [s for s in server.slots() if s["running"]], "a busy worker")
            os.kill(busy[0]["pid"], signal.SIGKILL)
            wait_for(
                lambda killed=killed: (
                    total(grown(), "mayfly_worker_restarts_total", "'lost'") >= killed
                ),
                "a counted loss",
            )
            wait_for(lambda: all(s["state"] == "ready" for s in server.slots()), "a successor")
        server.recycle()
        wait_for(
            lambda: total(grown(), "mayfly_worker_restarts_total", "'asked'") >= 1, "a recycle"
        )
        before = total(seen, name)
        wait_for(lambda: total(grown(), name) > before + 200, "tokens of their successors")
        assert total(seen, "mayfly_worker_starts_total") >= 5
        assert total(seen, "mayfly_request_success_total") > 0
