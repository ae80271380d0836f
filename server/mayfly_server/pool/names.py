"""From a host's name to its address.

ZeroMQ looks names up itself, but on the one thread that moves all of its messages: a name that
nobody answers for, as that of a Mac which is switched off, would hold every stream of a front end
up for seconds, again and again.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

from mayfly_protocol.addresses import bracketed


def is_numeric(host: str) -> bool:
    """Whether this is an address, with or without brackets, and no name."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


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
