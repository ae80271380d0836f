"""Signals to the reaper as a socket that its event loop polls, and its resource limits.

A signal only writes its number into the socket: the loop notices a child's death within
milliseconds, and acts on INT and TERM when its present work is done.
"""

from __future__ import annotations

import resource
import signal
import socket
from types import FrameType, TracebackType
from typing import Any

from mayfly_protocol.common import limits

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class SignalInbox:
    """Receives the signals CHLD, TERM, INT and HUP inside a ``with`` block; for the main thread
    only.

    If HUP was ignored before, it stays ignored, as nohup asks for.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._handlers: dict[int, Any] = {}
        self._wakeup_fd = -1

    def fileno(self) -> int:
        return self._reader.fileno()

    def read(self) -> list[int]:
        """Returns the numbers of the signals that came in since the last call, in order."""
        try:
            return list(self._reader.recv(4096))
        except BlockingIOError:
            return []

    def __enter__(self) -> SignalInbox:
        # A full socket already says what one more byte would.
        self._wakeup_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *STOP_SIGNALS):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._handlers[number] = signal.signal(number, _only_wake_up)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(self._wakeup_fd)
        self._reader.close()
        self._writer.close()


def _only_wake_up(number: int, frame: FrameType | None) -> None:
    """Does nothing: Python has already written the signal's number into the wake-up socket."""


def set_limits() -> None:
    """Sets the resource limits of this process and the processes that it starts: no core dumps,
    since a worker's core would be as large as its model, and as many open files as the system
    grants."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    limits.raise_open_file_limit()
