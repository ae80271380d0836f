"""Hosts and origins that requests may name, and addresses that other machines can reach."""

from __future__ import annotations

import socket

import pytest

from mayfly_protocol.transport.addresses import is_loopback
from mayfly_server.http.api_keys import exposed_address
from mayfly_server.http.hosts import HostPolicy, host_name, own_names

OWN = frozenset({"mac.lan", "mac", "mac.local"})


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("localhost", "localhost"),
        ("LocalHost:8000", "localhost"),
        ("127.0.0.1:1", "127.0.0.1"),
        ("[::1]:8000", "::1"),
        ("[::1]", "::1"),
        ("example.com.", "example.com"),
        (" a_b.c ", "a_b.c"),
    ],
)
def test_hosts(header: str, name: str) -> None:
    assert host_name(header) == name


@pytest.mark.parametrize(
    "header", ["", ":8000", "a b", "a/b", "a@b", "::1", "[::1", "a:b", "a:123456", "x" * 256, "ä"]
)
def test_hosts_that_are_none(header: str) -> None:
    assert host_name(header) is None


@pytest.mark.parametrize("local", ["127.0.0.1", "::1", "192.168.1.5", None])
def test_this_machine_is_always_meant(local: str | None) -> None:
    policy = HostPolicy((), OWN)
    for host in ("localhost", "app.localhost", "127.0.0.1", "127.8.8.8", "::1", *OWN):
        assert policy.allows(host, local), host
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "notlocalhost"):
        assert not policy.allows(host, local), host


def test_addresses_are_allowed_beyond_the_loopback_interface() -> None:
    policy = HostPolicy((), OWN)
    for host in ("192.168.1.5", "fe80::1", "10.0.0.1"):
        assert policy.allows(host, "192.168.1.5")
        assert not policy.allows(host, "127.0.0.1")
    assert not policy.allows("0.0.0.0", "127.0.0.1")


def test_configured_names() -> None:
    policy = HostPolicy(("Example.com", "*.example.org"), OWN)
    assert policy.allows("example.com", "127.0.0.1")
    assert policy.allows("a.b.example.org", "127.0.0.1")
    for host in ("example.org", "sub.example.com", "evilexample.com", "xexample.org"):
        assert not policy.allows(host, "127.0.0.1"), host
    assert HostPolicy(("*",), OWN).allows("evil.example", "127.0.0.1")


def test_this_machines_names() -> None:
    names = own_names()
    assert socket.gethostname().lower().rstrip(".") in names
    assert any(name.endswith(".local") for name in names)


def test_loopback_addresses() -> None:
    for address in ("127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1"):
        assert is_loopback(address)
    for address in ("0.0.0.0", "::", "192.168.1.5", "::ffff:10.0.0.1", "fe80::1%eth0", "localhost"):
        assert not is_loopback(address)


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", None), ("0.0.0.0", "0.0.0.0")])
def test_exposed_sockets(host: str, address: str | None) -> None:
    with socket.create_server((host, 0)) as listener:
        assert exposed_address(listener) == address


def test_a_unix_socket_is_nobody_elses() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        assert exposed_address(listener) is None
