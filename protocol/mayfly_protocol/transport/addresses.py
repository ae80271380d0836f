"""Addresses of nodes and workers.

::

    ipc:///tmp/mayfly-501/1a2b3c4d/node.ipc    on the same machine
    tcp://127.0.0.1:7700                       on the same machine, without keys
    tcp://KEY@mac-2.local:7700                 anywhere; KEY is the node's public one, in hex

A node publishes its rosters (the state of its workers) at the port after the control port. A roster
gives only the port of a worker: a front end reaches the workers at the host at which it reaches the
node.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

KEY_DIGITS = 64
LOCALHOST = "127.0.0.1"


class AddressError(ValueError):
    """Error for a text that is no address; the message shows what an address looks like."""


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Address of a node (a reaper and its workers). ``control`` and ``roster`` are the ZeroMQ
    endpoints for requests to the node and for its published state. ``host`` is empty on ipc;
    ``key`` is the node's public key in hex, empty if the node has none."""

    control: str
    roster: str
    host: str = ""
    key: str = ""

    def __str__(self) -> str:
        """Returns the control endpoint without the key, for logs and labels."""
        return self.control

    def at(self, host: str) -> NodeAddress:
        """Returns this address, which has to be a TCP address, with its host replaced by
        ``host``."""
        control, roster = (
            f"tcp://{host}:{place.rpartition(':')[2]}" for place in (self.control, self.roster)
        )
        return NodeAddress(control, roster, host, self.key)


def node_address(text: str) -> NodeAddress:
    """Parses a node's address: ``ipc://PATH``, ``tcp://HOST:PORT`` or ``tcp://KEY@HOST:PORT``.

    Raises:
        AddressError: the text has none of these forms, or names another machine without a key.
    """
    if text.startswith("ipc://") and "/" in text[len("ipc://") :]:
        # Settings dataclasses import this module, and the command line imports them at each start.
        from zmq import IPC_PATH_MAX_LEN

        roster = text.rpartition("/")[0] + "/roster.ipc"
        for place in (text, roster):
            if len(place.removeprefix("ipc://").encode()) > IPC_PATH_MAX_LEN:
                raise AddressError(
                    f"{place!r} is too long: a socket's path has {IPC_PATH_MAX_LEN} bytes at "
                    "most on this system"
                )
        return NodeAddress(text, roster)
    if not text.startswith("tcp://"):
        raise AddressError(f"{text!r} is not a node's address, as in tcp://KEY@HOST:PORT")
    key, at, place = text.removeprefix("tcp://").rpartition("@")
    host, port = host_and_port(place)
    if port == 65535:
        raise AddressError(f"{text!r}: rosters need the port after the control port")
    if at and not is_key(key):
        raise AddressError(
            f"the part before the @ of {place} is not a key: a key is {KEY_DIGITS} hex digits, "
            "as `mayfly keys show` prints it on that node"
        )
    if not at and not is_loopback(host):
        raise AddressError(
            f"tcp://{place} is another machine and has no key: write tcp://KEY@{place}, with the "
            "KEY that `mayfly keys show` prints there"
        )
    return NodeAddress(f"tcp://{host}:{port}", f"tcp://{host}:{port + 1}", host, key)


def host_and_port(text: str) -> tuple[str, int]:
    """Splits ``host:port`` into the host and the port's number; an IPv6 address is in brackets in
    the text, and stays in brackets. Raises AddressError if the text has another form."""
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    well_formed = bare and not set(bare) & set(" /@#[]") and (":" in bare) == (bare != host)
    if not (colon and well_formed and port.isdecimal() and port.isascii()):
        raise AddressError(f"{text!r} is not a host and port, as in mac-2.local:7700")
    if not 0 < int(port) < 65536:
        raise AddressError(f"{text!r}: there is no port {port}")
    return host, int(port)


def host_and_range(text: str) -> tuple[str, PortRange]:
    """Splits ``host:first-last`` into the host and the range of ports. Raises AddressError if the
    text has another form."""
    host, _, ports = text.rpartition(":")
    return host, port_range(ports)


def is_key(text: str) -> bool:
    """Returns True for the text of a public key: 64 lowercase hex digits."""
    return len(text) == KEY_DIGITS and not set(text) - set("0123456789abcdef")


def is_loopback(host: str) -> bool:
    """Returns True for an IP address that only this machine can reach; False for a host name."""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        found = ipaddress.ip_address(bare.partition("%")[0])
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def is_ip_address(host: str) -> bool:
    """Returns True for an IP address, with or without brackets, and False for a host name."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def bracketed(host: str) -> str:
    """Puts an IPv6 address in brackets, as needed before a port; any other host stays as it is."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def worker_endpoint(node: NodeAddress, said: str) -> str:
    """Returns the endpoint at which a front end connects to a worker. ``said`` is the endpoint that
    the worker's node published; the host in it is replaced by the host at which the node is
    reached.

    Raises:
        AddressError: no worker of that node can have the endpoint ``said``.
    """
    kind, _, place = said.partition("://")
    if not node.host and kind == "ipc" and place:
        return said
    port = place.rpartition(":")[2]
    if node.host and kind == "tcp" and port.isdecimal() and port.isascii() and int(port) < 65536:
        return f"tcp://{node.host}:{int(port)}"
    raise AddressError(f"{said[:80]!r} is not an endpoint of a worker of {node}")


@dataclass(frozen=True, slots=True)
class PortRange:
    """A range of ports from ``first`` to ``last``, both included."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    def beginning_with(self, number: int) -> list[int]:
        """Lists all ports of the range, beginning with another port for each ``number``, so that a
        port that has just become free is not used again at once."""
        return [self.first + (number + step) % self.count for step in range(self.count)]


def port_range(text: str) -> PortRange:
    """Parses a range of ports such as ``7710-7799``, or a single port. Raises AddressError if the
    text has another form."""
    first, dash, last = text.partition("-")
    last = last if dash else first
    if not all(part.isdecimal() and part.isascii() for part in (first, last)):
        raise AddressError(f"{text!r} is not a range of ports, as in 7710-7799")
    if not 0 < int(first) <= int(last) < 65536:
        raise AddressError(f"{text!r}: ports go from 1 to 65535, and the smaller one comes first")
    return PortRange(int(first), int(last))
