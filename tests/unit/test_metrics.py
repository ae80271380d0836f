"""A front end's metrics page."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mayfly_server import errors
from mayfly_server.errors import ContextExceeded, RequestError
from mayfly_server.metrics import Metrics, reason_of
from support.doubles.fake_node import FakeNode, answer_words
from support.running_front import RunningFront

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def node() -> Iterator[FakeNode]:
    with FakeNode() as node:
        node.worker(answer_words())
        yield node


def test_every_error_has_a_reason_of_its_own() -> None:
    family = [e for e in vars(errors).values() if isinstance(e, type)]
    kinds = [kind for kind in family if issubclass(kind, RequestError)]
    examples = [
        ContextExceeded(9, 8, param=None) if kind is ContextExceeded else kind("text")
        for kind in kinds
    ]
    reasons = {reason_of(error) for error in examples}
    assert len(reasons) == len(kinds) > 15
    assert {"internal_error", "model_not_found", "overloaded", "workers_lost"} <= reasons


def test_requests_are_counted_by_route_and_status(node: FakeNode) -> None:
    with RunningFront(node.control) as front:
        assert front.client.post(CHAT, json=HELLO).status_code == 200
        assert front.client.post(CHAT, json={**HELLO, "model": "none"}).status_code == 404
        assert front.client.post(CHAT, json={**HELLO, "top_p": 7}).status_code == 400
        for number in range(20):
            assert front.client.get(f"/v1/nothing/{number}").status_code == 404
        assert front.metric(f'mayfly_http_requests_total{{route="{CHAT}",status="200"}}') == 1
        assert front.metric(f'mayfly_http_requests_total{{route="{CHAT}",status="400"}}') == 1
        assert front.metric('mayfly_http_requests_total{route="none",status="404"}') == 20
        assert front.metric('mayfly_rejections_total{reason="model_not_found"}') == 1
        assert front.metric('mayfly_rejections_total{reason="invalid_request"}') == 21


def test_what_no_application_sees_is_counted_too(node: FakeNode) -> None:
    with RunningFront(node.control) as front:
        with socket.create_connection(("127.0.0.1", front.port)) as client:
            client.sendall(b"GET /" + b"x" * 10_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 414 " in client.recv(4096)
        assert front.metric('mayfly_rejections_total{reason="address_too_long"}') == 1


def test_the_page_is_one_that_prometheus_reads(node: FakeNode) -> None:
    with RunningFront(node.control) as front:
        front.client.post(CHAT, json=HELLO)
        text = front.client.get("/metrics").text
        families = {f.name: f for f in text_string_to_metric_families(text)}
        [ready] = families["mayfly_workers_ready"].samples
        assert (ready.labels, ready.value) == ({"model": "tiny"}, 1)
        [up] = families["mayfly_node_up"].samples
        assert up.value == 1
        assert all(family.documentation for family in families.values())


def test_a_node_that_does_not_answer_costs_its_own_part_only(node: FakeNode) -> None:
    """The stand-in for a node knows nothing of metrics."""
    with RunningFront(node.control, node_metrics=True) as front:
        assert front.metric("mayfly_node_up") == 1
        assert front.metric("mayfly_node_scrapes_total") >= 1
        assert front.metric("mayfly_node_scrape_failures_total") >= 1


@pytest.mark.parametrize("down", [0, 1])
def test_two_nodes_of_one_name_are_up_if_both_are(down: int) -> None:
    with FakeNode() as first, FakeNode() as second:
        second.change(epoch="another")
        first.worker()
        with RunningFront(first.control, second.control, roster_silence_s=1.0) as front:
            front.wait(lambda: len(front.client.get("/mayfly/status").json()["nodes"]) == 2)
            front.wait(lambda: front.metric("mayfly_node_up") == 1)
            (first, second)[down].silent = True
            front.wait(lambda: front.metric("mayfly_node_up") == 0)


def test_models_are_counted_apart() -> None:
    metrics = Metrics()
    metrics.of("a").attempts.inc()
    metrics.of("b").attempts.inc()
    metrics.of("a").attempts.inc()
    value = metrics.registry.get_sample_value
    assert value("mayfly_request_attempts_total", {"model": "a"}) == 2
    assert value("mayfly_request_attempts_total", {"model": "b"}) == 1
