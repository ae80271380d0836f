"""Addresses of nodes and workers, and ranges of ports."""

from __future__ import annotations

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from mayfly_protocol.transport.addresses import (
    AddressError,
    NodeAddress,
    PortRange,
    host_and_port,
    host_and_range,
    is_loopback,
    node_address,
    port_range,
    worker_endpoint,
)

KEY = "0f" * 32
ports = st.integers(1, 65534)
names = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True)
hosts = names | st.ip_addresses(v=4).map(str) | st.ip_addresses(v=6).map(lambda ip: f"[{ip}]")


@given(hosts, ports)
def test_an_address_with_a_key(host: str, port: int) -> None:
    found = node_address(f"tcp://{KEY}@{host}:{port}")
    assert found == NodeAddress(f"tcp://{host}:{port}", f"tcp://{host}:{port + 1}", host, KEY)
    assert KEY not in str(found)


@given(hosts, hosts, ports)
def test_the_same_node_elsewhere(host: str, other: str, port: int) -> None:
    found = node_address(f"tcp://{KEY}@{host}:{port}").at(other)
    assert found == node_address(f"tcp://{KEY}@{other}:{port}")


@given(st.text(max_size=80))
def test_anything_else_is_refused_in_words(text: str) -> None:
    try:
        found = node_address(f"tcp://{text}")
    except AddressError as error:
        assert str(error)
    else:
        assert found.key or is_loopback(found.host)


@given(hosts, ports)
def test_without_a_key_only_this_machine_is_dialled(host: str, port: int) -> None:
    if is_loopback(host):
        assert node_address(f"tcp://{host}:{port}").key == ""
    else:
        with pytest.raises(AddressError, match="KEY"):
            node_address(f"tcp://{host}:{port}")


def test_sockets_of_this_machine() -> None:
    found = node_address("ipc:///tmp/mayfly-0/ab/node.ipc")
    assert (found.roster, found.host) == ("ipc:///tmp/mayfly-0/ab/roster.ipc", "")


@given(st.integers(80, 130), st.sampled_from(["n.ipc", "the-control-socket.ipc"]))
def test_a_path_is_refused_or_can_be_dialled(length: int, name: str) -> None:
    """Both sockets of a node can be dialled: the list of nodes may change while a front end
    serves."""
    text = f"ipc:///tmp/{'x' * length}/{name}"
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        try:
            found = node_address(text)
        except AddressError as error:
            assert "too long" in str(error)
            with pytest.raises(zmq.ZMQError):
                socket.connect(text)
                socket.connect(f"ipc:///tmp/{'x' * length}/roster.ipc")
        else:
            socket.connect(found.control)
            socket.connect(found.roster)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "mac-2:7700",
        "http://mac-2:7700",
        "ipc://node",
        f"tcp://{KEY}@mac-2",
        f"tcp://{KEY}@:7700",
        f"tcp://{KEY}@mac-2:0",
        f"tcp://{KEY}@mac-2:65535",
        f"tcp://{KEY}@mac-2:70000",
        f"tcp://{KEY}@mac 2:7700",
        f"tcp://{KEY}@fe80::1:7700",
        f"tcp://{KEY[1:]}@mac-2:7700",
        f"tcp://{KEY.upper()}@mac-2:7700",
        f"tcp://{KEY}@@mac-2:7700",
        "tcp://@127.0.0.1:7700",
        "tcp://127.0.0.1:٧٧",
    ],
)
def test_no_addresses(text: str) -> None:
    with pytest.raises(AddressError):
        node_address(text)


NODE = node_address(f"tcp://{KEY}@mac-2.local:7700")


@given(hosts, ports)
def test_a_worker_is_dialled_where_its_node_is(host: str, port: int) -> None:
    """Only the port of a worker's address in the roster counts, not its host."""
    assert worker_endpoint(NODE, f"tcp://{host}:{port}") == f"tcp://mac-2.local:{port}"
    assert worker_endpoint(NODE, f"tcp://*:{port}") == f"tcp://mac-2.local:{port}"


@given(st.text(max_size=40))
def test_a_worker_is_nowhere_else(said: str) -> None:
    """A roster makes no front end connect to a path, or to another host."""
    try:
        found = worker_endpoint(NODE, said)
    except AddressError:
        return
    assert found.startswith("tcp://mac-2.local:")


def test_on_this_machine_a_worker_is_a_path() -> None:
    local = node_address("ipc:///tmp/mayfly-0/ab/node.ipc")
    assert worker_endpoint(local, "ipc:///tmp/w1.ipc") == "ipc:///tmp/w1.ipc"
    for node, said in ((local, "tcp://*:7710"), (NODE, "ipc:///tmp/w1.ipc")):
        with pytest.raises(AddressError, match="not an endpoint"):
            worker_endpoint(node, said)


@given(st.integers(1, 65535), st.integers(0, 200), st.integers(0, 10**6))
def test_every_port_of_a_range_is_tried_once(first: int, more: int, number: int) -> None:
    ports = PortRange(first, min(first + more, 65535))
    tried = ports.beginning_with(number)
    assert sorted(tried) == list(range(ports.first, ports.last + 1))
    assert port_range(str(ports)) == ports
    if ports.first < ports.last:
        assert ports.beginning_with(number + 1)[0] != tried[0]


@pytest.mark.parametrize("text", ["", "a-b", "7799-7710", "0-10", "1-65536", "-", "7710-", "1-2-3"])
def test_no_ranges(text: str) -> None:
    with pytest.raises(AddressError):
        port_range(text)


def test_parts() -> None:
    assert port_range("7710") == PortRange(7710, 7710)
    assert host_and_port("[::1]:80") == ("[::1]", 80)
    assert host_and_range("[::]:7710-7799") == ("[::]", PortRange(7710, 7799))


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "::ffff:127.0.0.1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "localhost", "10.0.0.1", "")))
