"""A real Prometheus beside a running server, under load and while workers are lost and replaced."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from support.dashboards import GRAFANA, filled_in, queries, variables
from support.required_programs import require_program
from support.server import Server, free_port, serving, wait_for

PATIENCE_S = 60.0
WINDOW = "20s"
"""In which rates are taken; Prometheus looks every second here."""
THINK_S = 0.2
"""Seconds for which a client waits before it asks again."""


class Prometheus:
    """A Prometheus with the configuration of ``grafana/``, but for the server's address and the
    scrape interval."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        shutil.copytree(GRAFANA / "prometheus", folder / "config")
        file = folder / "config" / "prometheus.yml"
        text = file.read_text().replace("localhost:8000", f"127.0.0.1:{server.port}")
        file.write_text(re.sub(r"_interval: 15s", "_interval: 1s", text))
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE_S)
        with (folder / "prometheus.log").open("w") as log:
            self.process = subprocess.Popen(
                [
                    require_program("prometheus"),
                    f"--config.file={file}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                    "--log.level=warn",
                ],
                stdout=log,
                stderr=log,
            )

    def close(self) -> None:
        self.http.close()
        self.process.terminate()
        self.process.wait(PATIENCE_S)

    def ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self.http.get("/-/ready").status_code == 200
        return False

    def get(self, path: str, **parameters: Any) -> Any:
        answer = self.http.get(f"/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", (parameters, answer)
        return answer["data"]

    def value(self, query: str) -> float | None:
        """Returns the value of the only series; None if there is none."""
        result = self.get("query", query=query)["result"]
        return float(result[0]["value"][1]) if result else None

    def drawn(self, query: str) -> bool:
        """Returns True if a panel with this query has anything to draw, of the last two minutes."""
        now = time.time()
        answer = self.get("query_range", query=query, start=now - 120, end=now, step=1)
        values = (value for series in answer["result"] for _, value in series["values"])
        return any(math.isfinite(float(value)) for value in values)


@contextlib.contextmanager
def loaded(server: Server) -> Iterator[None]:
    """Requests of every kind, good ones and bad ones, for as long as the block lasts."""
    over = threading.Event()

    def ask() -> None:
        for number in itertools.count():
            if over.wait(THINK_S):
                return
            with contextlib.suppress(openai.OpenAIError):
                server.chat(f"Tell me story {number % 3}", max_tokens=300, stop=["\0"])
            server.post("/v1/chat/completions", {"model": "none", "messages": []})

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def busy(server: Server) -> dict[str, Any] | None:
    slots = [slot for slot in server.slots() if slot["state"] == "ready" and slot["running"]]
    return slots[0] if slots else None


@pytest.fixture(scope="module")
def watched(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Prometheus]]:
    """A server that has lost a worker in the middle of an answer and replaced another one, and a
    Prometheus that has seen it."""
    require_program("prometheus")
    folder = tmp_path_factory.mktemp("server")
    with serving(tiny_model, folder, "--workers", "2") as server:
        server.chat()
        prometheus = Prometheus(server, tmp_path_factory.mktemp("prometheus"))
        try:
            wait_for(prometheus.ready, "a Prometheus")
            wait_for(
                lambda: prometheus.value("mayfly_worker_starts_total"), "a first look", PATIENCE_S
            )
            with loaded(server):
                lost(server, prometheus)
                wait_for(lambda: ready(server) == 2, "a new worker")
                server.recycle()
                wait_for(
                    lambda: prometheus.value(
                        'sum(mayfly_worker_restarts_total{reason="asked"}) > 0'
                    ),
                    "a replaced worker",
                )
                yield server, prometheus
        finally:
            prometheus.close()


def lost(server: Server, prometheus: Prometheus) -> None:
    """Kills workers in the middle of what they do until a request had to go on elsewhere."""

    def killed() -> bool:
        slot = busy(server)
        if slot is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(slot["pid"], signal.SIGKILL)
        time.sleep(1.0)
        return bool(prometheus.value("sum(mayfly_continuations_total) > 0"))

    wait_for(killed, "a request that goes on elsewhere")


def ready(server: Server) -> int:
    return sum(slot["state"] == "ready" for slot in server.slots())


Watched = tuple[Server, Prometheus]


def test_every_query_of_every_panel_returns_data(watched: Watched) -> None:
    _, prometheus = watched
    pending = dict(queries())
    assert len(pending) > 30

    def drawn() -> bool:
        for where, query in list(pending.items()):
            if prometheus.drawn(filled_in(query, WINDOW)):
                del pending[where]
        return not pending

    until(drawn, lambda: f"nothing to draw: {pending}")
    for where, metric, label in variables():
        assert prometheus.get(f"label/{label}/values", **{"match[]": metric}), where


def test_the_rules_are_evaluated(watched: Watched) -> None:
    _, prometheus = watched

    def evaluated() -> bool:
        groups = prometheus.get("rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return len(rules) >= 14 and all(rule["health"] == "ok" for rule in rules)

    until(evaluated, lambda: str(prometheus.get("rules")))
    for rule in ("mayfly:workers_ready:sum", "sum(mayfly:worker_losses:increase30m)"):
        until(lambda r=rule: prometheus.value(r) is not None, lambda r=rule: f"no value: {r}")  # type: ignore[misc]


def test_no_label_names_a_process(watched: Watched) -> None:
    _, prometheus = watched
    labels = set(prometheus.get("labels"))
    assert {"model", "node", "slot", "kind", "reason"} <= labels
    assert not labels & {"pid", "incarnation", "epoch", "rid", "request_id"}


def test_promtool_likes_the_page(watched: Watched) -> None:
    server, _ = watched
    page = server.http.get("/metrics").content
    command = [require_program("promtool"), "check", "metrics"]
    ran = subprocess.run(command, input=page, capture_output=True)
    assert (ran.returncode, ran.stdout + ran.stderr) == (0, b"")


def until(condition: Callable[[], bool], complaint: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, complaint()
        time.sleep(0.5)
