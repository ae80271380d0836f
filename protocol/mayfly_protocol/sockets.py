"""ZeroMQ sockets with the options that were found to matter.

* A ROUTER drops silently to a peer that is dead or slow unless it is MANDATORY and asked not to
  block: a dead peer is then EHOSTUNREACH, one that does not read is EAGAIN at the high-water mark.
* A DEALER keeps what it could not send for whoever binds the endpoint next. So an endpoint is
  never bound twice, and a DEALER serves one peer and is closed with it. (IMMEDIATE would keep it
  from queueing, but a socket with that option drops what it has received and not yet read when its
  peer goes: the last words of a worker that leaves in good order.)
* LINGER 0: nothing that a process still holds when it leaves is owed to anybody, but for one
  bounded farewell that its sender flushes itself.
"""

from __future__ import annotations

from typing import Any

import zmq

MAX_FRAME_BYTES = 64 << 20
HIGH_WATER_MARK = 10_000


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
