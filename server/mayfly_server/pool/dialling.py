"""How a front end connects to nodes and their workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from mayfly_protocol.addresses import AddressError, NodeAddress, is_key, worker_endpoint
from mayfly_protocol.identity import KeyPair
from mayfly_protocol.roster import SlotView
from mayfly_protocol.sockets import dial_curve, over_tcp

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
