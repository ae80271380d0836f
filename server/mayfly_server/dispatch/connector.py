"""Connections from a front end to nodes and their workers: names, addresses and keys.

ZeroMQ can resolve host names itself, but does so on the thread that moves all of its messages: the
name of a machine that is switched off would stop every stream of the front end for seconds, again
and again. So host names are resolved here, by the event loop.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from mayfly_protocol.roster import SlotView
from mayfly_protocol.transport.addresses import (
    AddressError,
    NodeAddress,
    bracketed,
    is_key,
    worker_endpoint,
)
from mayfly_protocol.transport.keys import KeyPair
from mayfly_protocol.transport.sockets import configure_tcp, connect_curve


async def resolve_host(host: str) -> str:
    """Looks up a host name's IP address, in the form for a ZeroMQ endpoint (IPv6 in brackets).

    Raises:
        OSError: the host name has no address.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a part of the name is empty, or too long
        raise OSError(f"not a possible host name: {error}") from error
    return preferred_address(found)


def preferred_address(found: Sequence[tuple[Any, ...]]) -> str:
    """The first IPv4 address in a result of ``getaddrinfo``, else the first IPv6 address. IPv4 goes
    first because a local network's names often have IPv6 addresses that are valid on one link only.

    Raises:
        OSError: ``found`` is empty.
    """
    by_family = sorted(found, key=lambda each: each[0] != socket.AF_INET)
    if not by_family:
        raise OSError("the host name has no address")
    return bracketed(str(by_family[0][4][0]))


Connect = Callable[[zmq.Socket[Any]], None]
"""Function that connects a new socket to one fixed peer."""


@dataclass(frozen=True, slots=True)
class Connector:
    """Makes functions that connect sockets to nodes and workers. ``own`` is this front end's key
    pair; without one, the front end cannot connect to nodes that require a key.

    The methods raise AddressError if the peer has a key and the front end has none.
    """

    own: KeyPair | None = None

    def control(self, address: NodeAddress) -> Connect:
        """Makes the function that connects a socket to a node's reaper (the process that watches
        its workers), for control messages."""
        return self._to(address.host, address.control, address.key)

    def roster(self, address: NodeAddress) -> Connect:
        """Makes the function that connects a socket to the node's publisher of rosters: the lists
        of its workers and their states."""
        return self._to(address.host, address.roster, address.key)

    def worker(self, address: NodeAddress, view: SlotView) -> Connect:
        """Makes the function that connects a socket to a worker, whose port ``view`` gives, at the
        node's host. If the node has a key, the worker has to hold the secret half of
        ``view.public_key``.

        Raises:
            AddressError: the endpoint or key in ``view`` cannot be that of a worker of this node.
        """
        endpoint = worker_endpoint(address, view.endpoint)
        if address.key and not is_key(view.public_key):
            raise AddressError(f"worker {view.slot} of {address} has no key")
        return self._to(address.host, endpoint, view.public_key if address.key else "")

    def _to(self, host: str, endpoint: str, key: str) -> Connect:
        if key and self.own is None:
            raise AddressError(f"{endpoint} has a key, and this front end has none")
        own = self.own

        def connect(socket: zmq.Socket[Any]) -> None:
            if host:
                configure_tcp(socket, host)
            if key and own is not None:
                connect_curve(socket, own, key)
            socket.connect(endpoint)

        return connect
