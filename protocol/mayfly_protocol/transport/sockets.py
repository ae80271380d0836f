"""Options of ZeroMQ sockets that were found to matter.

* A ROUTER silently drops messages to a peer that is dead or slow, unless it is MANDATORY and sends
  without blocking: then a dead peer is EHOSTUNREACH, and one that does not read is EAGAIN at the
  high-water mark.
* A DEALER keeps messages that it could not send for the next socket that binds the endpoint. So an
  endpoint is never bound twice, and a DEALER serves one peer and is closed with it. (IMMEDIATE
  would keep it from queueing, but a socket with that option drops messages that it has received and
  not yet read when its peer goes: the last ones of a worker that leaves in good order.)
* LINGER 0: messages that a process still holds when it exits are dropped, except for one bounded
  farewell that its sender flushes itself.
* A cut link gives no signal: on TCP, both ends check every few seconds that the other one is still
  there (ZMTP heartbeats, answered by ZeroMQ's own thread), and close a connection if it is not.
* A connection that has not finished its handshake after HANDSHAKE_S is cut: until then it has cost
  no more than a file descriptor.
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
    """Sets the options of the list above on a new socket, as far as its type has them."""
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


def configure_tcp(socket: zmq.Socket[Any], host: str) -> None:
    """Sets the further options of a socket that connects to, or binds at, a TCP host."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(HEARTBEAT_LOST_S * 1000))
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
    if ":" in host:  # with it, a host name would resolve to link-local addresses first
        socket.setsockopt(zmq.IPV6, 1)


def serve_curve(socket: zmq.Socket[Any], own: KeyPair, domain: str) -> None:
    """Has a socket that is not bound yet take CURVE connections alone and ask about keys by ZAP."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, domain.encode())


def connect_curve(socket: zmq.Socket[Any], own: KeyPair, server: str) -> None:
    """Has a socket that is not connected yet talk to the holder of a public key alone."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(own.public))
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(server))
