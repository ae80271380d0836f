"""ZeroMQ sockets with the options that were found to matter.

* A ROUTER drops silently to a peer that is dead or slow unless it is MANDATORY and asked not to
  block: a dead peer is then EHOSTUNREACH, one that does not read is EAGAIN at the high-water mark.
* A DEALER keeps what it could not send for whoever binds the endpoint next. So an endpoint is
  never bound twice, and a DEALER serves one peer and is closed with it. (IMMEDIATE would keep it
  from queueing, but a socket with that option drops what it has received and not yet read when its
  peer goes: the last words of a worker that leaves in good order.)
* LINGER 0: nothing that a process still holds when it leaves is owed to anybody, but for one
  bounded farewell that its sender flushes itself.
* A link that is cut says nothing: on TCP, both ends ask every few seconds whether the other one is
  still there (ZMTP heartbeats, answered by ZeroMQ's own thread), and take a connection without an
  answer for lost.
* A connection that has not finished its handshake after HANDSHAKE_S is cut: by then it has cost no
  more than a file descriptor.
"""

from __future__ import annotations

from typing import Any

import zmq

from mayfly_protocol.transport.keys import KeyPair

MAX_FRAME_BYTES = 64 << 20
HIGH_WATER_MARK = 10_000
HEARTBEAT_S = 2.0
HEARTBEAT_LOST_S = 6.0
HANDSHAKE_S = 5.0


def configure(socket: zmq.Socket[Any]) -> None:
    """Sets the options of the list above on a fresh socket, as far as its type has them."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    if socket.type == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if socket.type == zmq.DEALER:
        # A peer that went away never comes back under the same name.
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)


def over_tcp(socket: zmq.Socket[Any], host: str) -> None:
    """What a socket that connects to, or binds at, a TCP host needs beside that."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(HEARTBEAT_LOST_S * 1000))
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
    if ":" in host:  # for a name it would prefer addresses that only the local link knows
        socket.setsockopt(zmq.IPV6, 1)


def serve_curve(socket: zmq.Socket[Any], own: KeyPair, domain: str) -> None:
    """Has a socket, once it is bound, speak CURVE alone, and ask about each peer's key by ZAP."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, domain.encode())


def dial_curve(socket: zmq.Socket[Any], own: KeyPair, server: str) -> None:
    """Has a socket, once it connects, speak to nobody but the holder of a public key."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(own.public))
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(server))
