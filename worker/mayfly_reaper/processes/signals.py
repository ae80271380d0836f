"""Signals to the reaper as a socket that its loop polls, and the limits of its processes.

A signal only writes its number into the socket: the loop notices a child's death within
milliseconds, and acts on INT and TERM in its own time.
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
    """Receives CHLD, TERM, INT and HUP while it is entered; main thread only.

    A HUP that was ignored before stays ignored: that is what nohup asks for.
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
        """Returns the numbers of the signals since the last call, in order."""
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
    """Does nothing: Python has written the number into the wake-up socket already."""


def set_limits() -> None:
    """Sets this process's limits, which its children inherit: no core dumps, since a worker's would
    be as large as its model, and as many open files as the system grants."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    limits.raise_open_file_limit()
