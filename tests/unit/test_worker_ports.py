"""Ports on which a worker on TCP listens, and its error when it cannot."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from mayfly_protocol.lifecycle import Exit, Fault
from mayfly_protocol.settings import WorkerSettings
from mayfly_protocol.transport.addresses import PortRange
from mayfly_worker.wire import EndpointError, Wire, bind_one
from support.server import free_ports
from support.worker import WorkerProcess


@pytest.fixture
def router() -> Iterator[zmq.Socket[Any]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        yield router


def test_a_taken_port_is_passed_over(router: zmq.Socket[Any]) -> None:
    first = free_ports(3)
    with socket.create_server(("127.0.0.1", first + 1)):
        ports = PortRange(first, first + 2).beginning_with(1)
        assert ports[0] == first + 1
        assert bind_one(router, "127.0.0.1", ports) == first + 2


def test_a_host_that_is_not_ours_is_no_matter_of_ports(router: zmq.Socket[Any]) -> None:
    with pytest.raises(zmq.ZMQError) as refused:
        bind_one(router, "192.0.2.1", [free_ports(1), free_ports(1)])
    assert refused.value.errno == zmq.EADDRNOTAVAIL


def test_a_worker_without_a_key_lets_nobody_in_from_elsewhere() -> None:
    """The address from its reaper does not matter."""
    paths = {"control": "inproc://nobody", "model_path": "/nowhere", "model_name": "m"}
    wire = Wire(WorkerSettings(slot="s", incarnation=1, listen="tcp://0.0.0.0:7710-7719", **paths))
    try:
        with pytest.raises(EndpointError, match="no key"):
            wire.listen()
    finally:
        wire.close(0)


@pytest.mark.process
def test_a_worker_without_a_port_says_so(tiny_model: Path, tmp_path: Path) -> None:
    first = free_ports(2)
    with contextlib.ExitStack() as stack:
        for port in (first, first + 1):
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        listen = f"tcp://127.0.0.1:{first}-{first + 1}"
        with WorkerProcess(tiny_model, tmp_path, listen=listen) as worker:
            [fault] = worker.wait(lambda: worker.received_of(Fault), "its last words")
            assert fault.kind == "load_failed"
            assert "Address already in use" in fault.first.text
            assert f"cannot listen on {listen}" in fault.later[0].text
            assert worker.process.wait(30) == Exit.LOAD_FAILED
