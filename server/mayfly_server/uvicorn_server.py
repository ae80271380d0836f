"""The uvicorn server of a front end, and its shutdown.

::

    listening --> announced to the nodes --SIGTERM, SIGINT, SIGHUP--> not ready
                                                                         | notice_s: load balancers
                                                                         | notice that it ends
                                                                         v
                                                                      no new connections
                                                                         | streams go on
                             all ended, or grace_s over: other streams end with an error
                                                                         v
                                                                       exit 0
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from mayfly_server.api.dependencies import Front
from mayfly_server.errors import RequestError
from mayfly_server.http.protocol import LimitedHttpProtocol
from mayfly_server.settings import FrontSettings

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LAST_ERRORS_S = 2.0
"""Seconds that clients have at a shutdown to read their streams' error events before their
connections are cut."""


class FrontServer(uvicorn.Server):
    """The uvicorn server of a front end. It tells the nodes when it begins to serve. At a shutdown,
    streams may go on for ``grace_s`` seconds; streams that are not done then end with an error."""

    def __init__(self, app: FastAPI, settings: FrontSettings) -> None:
        grace_s = settings.grace_s
        protocol: Any = partial(LimitedHttpProtocol, settings.connections, self._refused)
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
                timeout_graceful_shutdown=int(grace_s + LAST_ERRORS_S),
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
        """Lets :data:`STOP_SIGNALS` shut the server down. Uvicorn's own method would raise the
        signal again at the end, so that the process would seem to have failed."""
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
