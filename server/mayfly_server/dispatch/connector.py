"""Connections from a front end to nodes and their workers: names, addresses and keys.

ZeroMQ looks names up itself, but on the one thread that moves all of its messages: a name that
nobody answers for, as that of a Mac which is switched off, would hold every stream of a front end
up for seconds, again and again. So names are resolved here, on the event loop.
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
    """Looks up a name's address, as it stands in an endpoint.

    Raises:
        OSError: the name has no address.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a part of it is empty, or too long
        raise OSError(f"no host can be called so: {error}") from error
    return preferred_address(found)


def preferred_address(found: Sequence[tuple[Any, ...]]) -> str:
    """The first IPv4 address that ``getaddrinfo`` found, else the first IPv6 one: a name of the
    local network often has an IPv6 address, too, that means something on one link only."""
    by_family = sorted(found, key=lambda each: each[0] != socket.AF_INET)
    if not by_family:
        raise OSError("it has no address")
    return bracketed(str(by_family[0][4][0]))


Connect = Callable[[zmq.Socket[Any]], None]
"""Connects a socket that has no connection yet."""


@dataclass(frozen=True, slots=True)
class Connector:
    """Makes the functions that connect sockets. ``own`` is this front end's key pair; without one
    it reaches no node that has a key."""

    own: KeyPair | None = None

    def control(self, address: NodeAddress) -> Connect:
        """Connects to the node's reaper."""
        return self._to(address.host, address.control, address.key)

    def roster(self, address: NodeAddress) -> Connect:
        """Connects to the source of the node's rosters."""
        return self._to(address.host, address.roster, address.key)

    def worker(self, address: NodeAddress, view: SlotView) -> Connect:
        """Connects to a worker of the node, at the node's host. Where the node has a key, only to
        the holder of the worker's key in the roster.

        Raises:
            AddressError: the view's endpoint or key cannot be those of a worker of this node.
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
