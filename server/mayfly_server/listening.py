"""The sockets that a front end listens on: one of its own, or those that systemd holds for it.

With socket activation the service manager binds and listens, and hands the sockets over from
descriptor 3 on, their number in ``LISTEN_FDS``, for the process that ``LISTEN_PID`` names
(sd_listen_fds(3)). They stay open while a front end is replaced, so that clients wait in their
queue instead of being refused.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

BACKLOG = 2048
FIRST_FD = 3
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


class ListenError(Exception):
    """There is no socket to serve on. The text says which, and why."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket of this process's own. Raises ListenError."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        # A name that does not resolve has a negative number and a text of its own.
        number = error.errno or 0
        reason = os.strerror(number) if number > 0 else error.strerror
        raise ListenError(f"cannot listen on {host} port {port}: {reason}") from error


def activated(
    environ: MutableMapping[str, str], *, pid: int, first: int = FIRST_FD
) -> list[socket.socket]:
    """The listening sockets that were handed to the process ``pid``; none where that is another
    one, or nobody did. The variables are taken out of ``environ``, for they are not meant for
    children.

    Raises:
        ListenError: what was handed over cannot be served on.
    """
    meant_for, count = (environ.get(name, "") for name in _VARIABLES[:2])
    for name in _VARIABLES:
        environ.pop(name, None)
    if meant_for != str(pid):
        return []
    if not count.isdecimal():
        raise ListenError(f"LISTEN_FDS is {count!r}, and should be a number of sockets")
    return [_listening(number) for number in range(first, first + int(count))]


def _listening(number: int) -> socket.socket:
    """The one with this descriptor."""
    try:
        handed = socket.socket(fileno=number)
    except OSError as error:
        raise ListenError(f"descriptor {number} is no socket: {error.strerror}") from error
    listens = handed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    tcp = handed.family in (socket.AF_INET, socket.AF_INET6) and handed.type == socket.SOCK_STREAM
    if not (tcp and listens):
        handed.close()
        raise ListenError(
            f"descriptor {number} is no listening TCP socket; "
            "the socket unit needs ListenStream=PORT and Accept=no"
        )
    handed.set_inheritable(False)
    return handed
