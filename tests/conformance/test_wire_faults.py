"""A real node and a real front end on TCP, while a process or the network between them fails. Where
the system allows it, the node's monotonic clocks are a day ahead of the front end's."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from mayfly_protocol import codec
from mayfly_protocol.codec import encode
from mayfly_protocol.serving import Finish, Submit, Tokens
from support.models.scripted import DEFAULT_REPLY
from support.server import wait_for
from support.tcp_nodes import A_DAY_OFF, DEADLINE_S, OTHER_HOST, Site, TcpNode
from support.worker import generation

ENDLESS = "Once upon a time"
"""A prompt after which the model repeats itself as long as it may."""


@pytest.fixture(scope="module")
def site(
    scripted_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    try:
        possible = subprocess.run([*A_DAY_OFF, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        possible = False
    folder = tmp_path_factory.mktemp("site")
    model = scripted_model(step_s=0.02)
    site = Site(model, folder, "--trust-remote-code", a_day_off=possible)
    try:
        site.front.wait_ready()
        yield site
    finally:
        site.close()


def test_clocks_a_day_apart_matter_to_nobody(site: Site) -> None:
    answer = site.front.chat("Hello?", max_tokens=64)
    assert answer.json()["choices"][0]["message"]["content"] == DEFAULT_REPLY
    status = site.roster()
    assert not status["silent"]
    assert 0 <= status["slots"][0]["age_s"] < DEADLINE_S * 10


def test_an_older_front_end_is_served(site: Site) -> None:
    """The front end sends only messages of the first protocol version."""
    submit = Submit("older", 1, generation(ENDLESS, max_tokens=5))
    version, name, sent = msgpack.unpackb(encode(submit), strict_map_key=False)
    needed = {key: sent[key] for key in ("rid", "attempt", "generation")}
    assert needed.keys() < {field.name for field in fields(Submit)}
    text = ""
    with site.ask_worker() as peer:
        peer.send(msgpack.packb([version, name, needed]))
        while True:
            assert peer.poll(int(DEADLINE_S * 1000))
            match codec.to_front_end.decode(peer.recv()):
                case Tokens(deltas):
                    text += "".join(delta.text for delta in deltas)
                case Finish(usage=usage):
                    break
    assert usage.completion_tokens == 5
    assert text and text in DEFAULT_REPLY * 2


def test_a_worker_cancels_what_a_vanished_front_end_left(site: Site) -> None:
    """The front end's link is stalled: no connection ends, but no message comes from it."""
    body = {"model": site.node.model.name, "prompt": ENDLESS, "max_tokens": 3000, "stream": True}
    with site.front.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert next(lines)
        wait_for(lambda: site.view().running == 1, "the request to run")
        site.proxy.stalled = True
        try:
            wait_for(lambda: site.view().running == 0, "the worker to give it up")
        finally:
            site.proxy.heal()
    site.front.wait_ready()
    answer = site.front.chat("Hello?", max_tokens=64)
    assert answer.json()["choices"][0]["message"]["content"] == DEFAULT_REPLY


def test_a_stream_ends_for_a_key_that_is_revoked(site: Site) -> None:
    """And for that one alone."""
    body = {"model": site.node.model.name, "prompt": ENDLESS, "max_tokens": 150}
    moved = site.front.metric("mayfly_continuations_total")
    answers: list[Any] = []
    asking = threading.Thread(
        target=lambda: answers.append(site.front.http.post("/v1/completions", json=body))
    )
    with site.ask_worker() as friend:
        friend.send(encode(Submit("revoked", 1, generation(ENDLESS, max_tokens=3000))))
        asking.start()
        wait_for(lambda: site.view().running == 2, "both to run")
        assert friend.poll(int(DEADLINE_S * 1000))
        before = site.refused("revoked")
        with site.node.trusting(site.own.public):
            wait_for(lambda: site.refused("revoked") > before, "the worker to have looked")
            wait_for(lambda: site.roster()["slots"][0]["running"] < 2, "the end of its request")

            def silent() -> bool:
                while friend.poll(0):
                    friend.recv()
                return not friend.poll(500)  # a step takes 20 ms

            wait_for(silent, "the stream to end")
            asking.join()
    [answer] = answers
    assert answer.json()["usage"]["completion_tokens"] == 150
    assert site.front.metric("mayfly_continuations_total") == moved


def test_a_flood_of_nonsense_is_counted_and_keeps_nobody_waiting(site: Site) -> None:
    before = site.refused("nonsense")
    over = threading.Event()
    control = site.peer(zmq.DEALER, site.node.port, site.friend, site.node.pair.public)
    peers = [site.ask_worker(), control]

    def flood() -> None:
        frame = b"\xc1" + b"x" * 200
        while not over.is_set():
            for peer in peers:
                try:
                    peer.send(frame, zmq.NOBLOCK)
                except zmq.Again:
                    over.wait(0.01)

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        for _ in range(3):
            answer = site.front.chat("Hello?", max_tokens=64)
            assert answer.json()["choices"][0]["message"]["content"] == DEFAULT_REPLY
        wait_for(lambda: site.refused("nonsense") > before + 1000, "a thousand refusals")
    finally:
        over.set()
        flooding.join()
        for peer in peers:
            peer.close()
    assert not site.roster()["silent"]
    assert site.node.log().count("(nonsense)") <= 2, "it is said seldom"


def test_a_node_that_is_started_again_is_found_again(site: Site) -> None:
    """The node keeps its address and its key, and has other clocks."""
    pid, node = site.roster()["slots"][0]["pid"], site.node
    assert node.stop() == 0
    wait_for(lambda: site.front.http.get("/readyz").status_code == 503, "the node to be missed")
    trusted = (site.own.public, site.friend.public)
    options: Any = {"port": node.port, "options": ("--trust-remote-code",)}
    site.node = TcpNode(node.model, node.state_dir.parent, *trusted, **options)
    site.front.wait_ready()
    assert site.roster()["slots"][0]["pid"] != pid
    answer = site.front.chat("Hello?", max_tokens=64)
    assert answer.json()["choices"][0]["message"]["content"] == DEFAULT_REPLY
    assert OTHER_HOST in site.front.log()
