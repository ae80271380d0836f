"""How a front end connects to nodes and their workers.

From a host's name to its address.

ZeroMQ looks names up itself, but on the one thread that moves all of its messages: a name that
nobody answers for, as that of a Mac which is switched off, would hold every stream of a front end
up for seconds, again and again.
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
from mayfly_protocol.transport.sockets import dial_curve, over_tcp


async def lookup(host: str) -> str:
    """A name's address, as it stands in an endpoint.

    Raises:
        OSError: it has none.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a part of it is empty, or too long
        raise OSError(f"no host can be called so: {error}") from error
    return preferred(found)


def preferred(found: Sequence[tuple[Any, ...]]) -> str:
    """Of what ``getaddrinfo`` gives, IPv4 first: a name of the local network often has an IPv6
    address, too, that means something on one link only."""
    by_family = sorted(found, key=lambda each: each[0] != socket.AF_INET)
    if not by_family:
        raise OSError("it has no address")
    return bracketed(str(by_family[0][4][0]))


Dial = Callable[[zmq.Socket[Any]], None]
"""Connects a socket that has no connection yet."""


@dataclass(frozen=True, slots=True)
class Dialler:
    """``own`` is this front end's key pair; without one it reaches no node that has a key."""

    own: KeyPair | None = None

    def control(self, address: NodeAddress) -> Dial:
        """To the node's reaper."""
        return self._to(address.host, address.control, address.key)

    def roster(self, address: NodeAddress) -> Dial:
        """To where its rosters come from."""
        return self._to(address.host, address.roster, address.key)

    def worker(self, address: NodeAddress, view: SlotView) -> Dial:
        """To a worker of the node: at the host that the node was dialled at, and where the node has
        a key, to nobody but the holder of the one that the roster gives.

        Raises:
            AddressError: the view names no worker that this node could have.
        """
        endpoint = worker_endpoint(address, view.endpoint)
        if address.key and not is_key(view.public_key):
            raise AddressError(f"worker {view.slot} of {address} has no key")
        return self._to(address.host, endpoint, view.public_key if address.key else "")

    def _to(self, host: str, endpoint: str, key: str) -> Dial:
        if key and self.own is None:
            raise AddressError(f"{endpoint} has a key, and this front end has none")
        own = self.own

        def dial(socket: zmq.Socket[Any]) -> None:
            if host:
                over_tcp(socket, host)
            if key and own is not None:
                dial_curve(socket, own, key)
            socket.connect(endpoint)

        return dial
