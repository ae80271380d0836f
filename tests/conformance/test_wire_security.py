"""A real node and a real front end on TCP: peers without a trusted key get nothing from any of the
node's sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest
import zmq

from mayfly_protocol.codec import encode
from mayfly_protocol.lifecycle import Hello
from mayfly_protocol.roster import Ask, DrainNode, Recycle
from mayfly_protocol.serving import Ping
from mayfly_protocol.transport.keys import KeyPair, new_pair, trusted_file
from mayfly_protocol.transport.sockets import configure, connect_curve
from support.server import wait_for
from support.tcp_nodes import Site, send_unless_refused

SECRET = "the heron wades at dawn"
PATIENCE_MS = 20_000
QUIET_MS = 500


@pytest.fixture(scope="module")
def site(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tiny_model, tmp_path_factory.mktemp("site"))
    try:
        site.front.wait_ready()
        yield site
    finally:
        site.close()


def sockets(site: Site) -> Iterator[tuple[str, Callable[[KeyPair | None], zmq.Socket[Any]]]]:
    """Every socket of the node, and how to knock there with a key, or without one."""
    worker_port, worker_key = site.worker()

    def control(own: KeyPair | None) -> zmq.Socket[Any]:
        peer = site.peer(zmq.DEALER, site.node.port, own, site.node.pair.public)
        send_unless_refused(peer, encode(Ask()))
        return peer

    def roster(own: KeyPair | None) -> zmq.Socket[Any]:
        return site.peer(zmq.SUB, site.node.port + 1, own, site.node.pair.public)

    def serving(own: KeyPair | None) -> zmq.Socket[Any]:
        peer = site.peer(zmq.DEALER, worker_port, own, worker_key)
        send_unless_refused(peer, encode(Ping(1)))
        return peer

    yield from (("control", control), ("roster", roster), ("worker", serving))


def test_every_listening_port_of_the_node_is_walked_over(site: Site) -> None:
    """So that a socket which is added one day is not forgotten below."""
    processes = [psutil.Process(site.node.process.pid)]
    processes += processes[0].children(recursive=True)
    listening = {
        connection.laddr.port
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {site.node.port, site.node.port + 1, site.worker()[0]}


def test_a_friend_is_answered_at_every_socket(site: Site) -> None:
    """Shows that the silence in the tests below is no accident."""
    for name, knock in sockets(site):
        with knock(site.friend) as peer:
            assert peer.poll(PATIENCE_MS), name


@pytest.mark.parametrize("who", ["a stranger", "somebody without CURVE"])
def test_others_get_nothing_from_any_socket(site: Site, who: str) -> None:
    own = new_pair() if who == "a stranger" else None
    reason = "untrusted" if own is not None else "handshake"
    for name, knock in sockets(site):
        before = site.refused(reason)
        with knock(own) as peer:
            wait_for(lambda b=before: site.refused(reason) > b, f"a count at {name}")  # type: ignore[misc]
            assert not peer.poll(QUIET_MS), name
    assert site.front.chat("Hello?").status_code == 200


def test_a_revoked_key_gets_nothing_over_connections_that_are_open(site: Site) -> None:
    peers = [(name, knock, knock(site.friend)) for name, knock in sockets(site)]
    for name, _, peer in peers:
        assert peer.poll(PATIENCE_MS), name
    before = {reason: site.refused(reason) for reason in ("untrusted", "revoked")}
    with site.node.trusting(site.own.public):
        for reason in before:  # of the sockets that are bound anew, and of the worker
            wait_for(lambda r=reason: site.refused(r) > before[r], f"the doors to shut: {reason}")  # type: ignore[misc]
        for name, knock, peer in peers:
            while peer.poll(0):
                peer.recv_multipart()
            if name == "worker":  # the others have no connection any more
                send_unless_refused(peer, encode(Ping(2)))
            assert not peer.poll(QUIET_MS), f"{name}, open"
            peer.close()
            with knock(site.friend) as again:
                assert not again.poll(QUIET_MS), f"{name}, anew"
        wait_for(
            lambda: site.refused("revoked") >= before["revoked"] + 2, "the word sent after it, too"
        )
        assert site.front.chat("Still there?").status_code == 200
    assert site.worker()


def test_a_list_that_breaks_changes_nothing_and_is_complained_of(site: Site) -> None:
    test_a_friend_is_answered_at_every_socket(site)
    file = trusted_file(site.node.state_dir)
    before = file.read_text()
    file.write_text("who?\n")
    try:
        wait_for(lambda: "the trusted keys stay as they were" in site.node.log(), "a complaint")
        test_a_friend_is_answered_at_every_socket(site)
    finally:
        file.write_text(before)


def test_a_friend_over_the_network_is_no_operator_and_no_worker(site: Site) -> None:
    """Commands, and words that only a worker may say, change nothing there."""
    pid = site.roster()["slots"][0]["pid"]
    before = site.refused("nonsense")
    impostor = site.context.socket(zmq.DEALER)
    configure(impostor)
    slot = site.roster()["slots"][0]
    impostor.setsockopt(zmq.ROUTING_ID, f"{slot['slot']}#{slot['incarnation']}".encode())
    connect_curve(impostor, site.friend, site.node.pair.public)
    with impostor:
        impostor.connect(f"tcp://127.0.0.1:{site.node.port}")
        for said in (Recycle(), DrainNode(0.0), Hello("x", 1, 1)):
            send_unless_refused(impostor, encode(said))
        send_unless_refused(impostor, b"\xc1 nonsense")
        wait_for(lambda: site.refused("nonsense") >= before + 4, "four refusals")
    assert "message of 127.0.0.1 (nonsense)" in site.node.log()
    assert site.roster()["slots"][0]["pid"] == pid
    assert site.front.chat("Hello?").status_code == 200


def test_another_version_is_named_and_changes_nothing(site: Site) -> None:
    for name, knock in sockets(site):
        if name == "roster":
            continue  # nobody says anything there
        before = site.refused("version")
        with knock(site.friend) as peer:
            assert peer.poll(PATIENCE_MS)
            peer.recv()
            send_unless_refused(peer, msgpack.packb([2, "Ask", {}]))
            wait_for(lambda b=before: site.refused("version") > b, f"a count at {name}")  # type: ignore[misc]
            assert not peer.poll(300), name
    assert "message of 127.0.0.1 (version)" in site.node.log()


def test_no_prompt_crosses_the_wire_in_clear(site: Site) -> None:
    site.proxy.passed.clear()
    answer = site.front.chat(SECRET, max_tokens=12, logprobs=False)
    assert answer.status_code == 200
    text = answer.json()["choices"][0]["message"]["content"]
    assert len(site.proxy.passed) > 1000, "it came this way"
    for part in (SECRET.encode(), b"heron", text.encode(), b"Submit", b"Tokens"):
        assert part not in site.proxy.passed


def test_no_secret_is_shown(site: Site) -> None:
    """Neither on a command line nor in a log."""
    processes = [psutil.Process(site.node.process.pid), psutil.Process(site.front.process.pid)]
    processes += processes[0].children(recursive=True)
    shown = " ".join(part for process in processes for part in process.cmdline())
    shown += site.node.log() + site.front.log()
    for pair in (site.node.pair, site.own):
        assert pair.secret.hex() not in shown
    assert site.node.pair.public in shown
