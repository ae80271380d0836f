"""Uvicorn, as a front end needs it.

::

    listening --> announced to the nodes --SIGTERM, SIGINT, SIGHUP--> not ready
                                                                         | notice_s: whoever sends
                                                                         | requests here hears of it
                                                                         v
                                                                      no new connections
                                                                         | streams go on
                                    all ended, or grace_s over: the rest end with an error
                                                                         v
                                                                       exit 0

The sockets that a front end listens on: one of its own, or those that systemd holds for it.

With socket activation the service manager binds and listens, and hands the sockets over from
descriptor 3 on, their number in ``LISTEN_FDS``, for the process that ``LISTEN_PID`` names
(sd_listen_fds(3)). They stay open while a front end is replaced, so that clients wait in their
queue instead of being refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator, MutableMapping
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from mayfly_server.api.dependencies import Front
from mayfly_server.errors import RequestError
from mayfly_server.http.protocol import EdgeProtocol
from mayfly_server.settings import FrontSettings

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


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_FAREWELL_S = 2.0
"""For error events to reach their clients, before connections are cut."""


class FrontServer(uvicorn.Server):
    def __init__(self, app: FastAPI, settings: FrontSettings) -> None:
        grace_s = settings.grace_s
        protocol: Any = partial(EdgeProtocol, settings.connections, self._refused)
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=protocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=int(grace_s + _FAREWELL_S),
            )
        )
        self._app = app
        self._grace_s = grace_s
        self._notice_s = settings.notice_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._front.fleet.announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._front.fleet.leaving = True
        await asyncio.sleep(self._notice_s)
        last_call = asyncio.get_running_loop().call_later(
            self._grace_s, self._front.fleet.end_requests
        )
        try:
            await super().shutdown(sockets)
        finally:
            last_call.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Uvicorn's own would raise the signal again at the end: being stopped is no failure."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, self._stop)
            for number in STOP_SIGNALS
            if signal.getsignal(number) is not signal.SIG_IGN  # as nohup leaves SIGHUP
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def _front(self) -> Front:
        front: Front = self._app.state.front
        return front

    def _refused(self, error: RequestError) -> None:
        self._front.metrics.rejected(error)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.should_exit = True
