"""Who can reach a listening socket."""

from __future__ import annotations

import socket

from mayfly_protocol.addresses import is_loopback

HOW = (
    "set MAYFLY_API_KEYS or --api-keys-file (`mayfly keys new FILE NAME` makes a key), "
    "or say --insecure"
)


def exposed(listener: socket.socket) -> str | None:
    """The address at which others can reach a listening socket, if they can."""
    if listener.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    address: str = listener.getsockname()[0]
    return None if is_loopback(address) else address


def refusal(address: str) -> str:
    """Why a server without keys does not start there."""
    return f"others could use this server at {address} without a key: {HOW}"
