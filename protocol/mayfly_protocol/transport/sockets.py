"""Options of ZeroMQ sockets that were found to matter.

* A ROUTER silently drops messages to a peer that is dead or slow, unless it is MANDATORY and sends
  without blocking: then a dead peer is EHOSTUNREACH, and one that does not read is EAGAIN at the
  high-water mark.
* A DEALER keeps messages that it could not send for the next socket that binds the endpoint. So an
  endpoint is never bound twice, and a DEALER serves one peer and is closed when the peer is gone.
  (The option IMMEDIATE would keep a DEALER from queueing, but when the peer goes it also drops
  messages that were received and not yet read: the last messages of a worker that leaves.)
* LINGER 0: messages that a process still holds when it exits are dropped, except for one bounded
  farewell that its sender flushes itself.
* A cut link gives no signal: on TCP, both ends check every few seconds that the other end is still
  there (ZMTP heartbeats, answered by ZeroMQ's own thread), and close the connection if it is not.
* A connection that has not finished its handshake after HANDSHAKE_S seconds is cut; it has cost no
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
    """Sets Mayfly's options on a new ZeroMQ socket: no lingering, limits on the size and number of
    queued messages, and options of its socket type."""
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
    """Sets the further options of a socket that connects to, or binds at, a TCP host: ZMTP
    heartbeats, a time limit for the handshake, and IPv6 if ``host`` needs it."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(HEARTBEAT_LOST_S * 1000))
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
    if ":" in host:  # with it, a host name would resolve to link-local addresses first
        socket.setsockopt(zmq.IPV6, 1)


def serve_curve(socket: zmq.Socket[Any], own: KeyPair, domain: str) -> None:
    """Makes a socket that is not bound yet accept only CURVE connections whose keys pass ZAP,
    ZeroMQ's authentication protocol; ``domain`` is the socket's name in ZAP requests."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, domain.encode())


def connect_curve(socket: zmq.Socket[Any], own: KeyPair, server: str) -> None:
    """Makes a socket that is not connected yet talk only to the holder of the public key
    ``server``."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(own.public))
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(server))
