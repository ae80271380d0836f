"""Listening TCP sockets for HTTP."""

from __future__ import annotations

import socket

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """Opens a listening TCP socket. A host name that has an IPv4 address is bound at that address.

    Raises:
        OSError: the host name cannot be resolved, or the address cannot be used.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
