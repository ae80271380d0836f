"""A node's sockets for front ends, when a peer is no longer trusted."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from mayfly_protocol.transport.addresses import PortRange
from mayfly_protocol.transport.keys import make_pair, new_pair, trusted_file, write_trusted
from mayfly_reaper.publish import sockets
from mayfly_reaper.publish.sockets import Gateway
from mayfly_reaper.settings import Network
from support.node import wait_until
from support.server import free_ports


def test_a_node_that_cannot_listen_again_says_so_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "REBIND_S", 0.1)
    make_pair(tmp_path)
    trusted = trusted_file(tmp_path)
    write_trusted(trusted, {new_pair().public: "one", new_pair().public: "two"})
    port = free_ports(2)
    notes: list[str] = []
    with ExitStack() as stack:
        network = Network("127.0.0.1", port, PortRange(1, 1))
        node = Gateway(network, tmp_path, zmq.Poller(), stack, notes.append)

        def said(text: str) -> bool:
            assert list(node.requests()) == []
            return any(text in note for note in notes)

        # The machine has another address by now.
        monkeypatch.setattr(node, "_host", "192.0.2.1")
        write_trusted(trusted, {new_pair().public: "three"})
        wait_until(lambda: said("are disconnected"), "the revocation")
        complaint = f"no front end reaches this node: cannot listen on 192.0.2.1 port {port}"
        wait_until(lambda: said(complaint), "a complaint")
        for _ in range(100):
            said(complaint)
        assert sum("no front end" in note for note in notes) == 1

        monkeypatch.setattr(node, "_host", "127.0.0.1")
        with zmq.Context() as context, context.socket(zmq.REQ) as client:
            monitor = client.get_monitor_socket(zmq.EVENT_CONNECTED)
            client.linger = 0
            client.connect(f"tcp://127.0.0.1:{port}")
            wait_until(lambda: said("are disconnected") and bool(monitor.poll(0)), "a listener")
            client.disable_monitor()
            monitor.close(0)
