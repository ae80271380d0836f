"""Front end of a node under ``mayfly serve``: started, probed, started again and stopped.

The reaper holds the listening socket and the front end inherits it: a port that is in use is
noticed before any model loads, and while a front end that crashed is replaced, connections wait in
the socket's queue. The reaper finds out as any client would that the front end serves: with a
GET /livez.

::

    start --> running --exit--> waiting --back-off--> running
                 |
                 +-- stop: SIGTERM --> leaving --exit--> gone
                                          +-- too long, or hurried: SIGKILL
"""

from __future__ import annotations

import errno
import random
import socket
import subprocess
from collections.abc import Callable

import zmq

from mayfly_protocol.transport import listening
from mayfly_reaper.paths import StartError
from mayfly_reaper.rules.backoff import backoff_s
from mayfly_reaper.rules.exit_cause import describe_status
from mayfly_reaper.settings import Budgets, FrontEnd

PROBE_AGAIN_S = 0.5


def listen(host: str, port: int, options: tuple[str, str] = ("--host", "--port")) -> socket.socket:
    """Returns a listening TCP socket. Raises StartError if the address cannot be used; the error
    names ``options``, the command-line options for another host and another port."""
    try:
        return listening.listen(host, port)
    except OSError as error:
        host_is_wrong = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        raise StartError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; "
            f"choose another one with {options[0] if host_is_wrong else options[1]}"
        ) from error


class FrontEndProcess:
    """Starts the front end process, starts it again when it ends, and stops it.

    Args:
        listener: the listening socket on which the front end serves.
        node: the ZeroMQ control address of the node.
        poller: the reaper's poller, for the socket of the probe.
        note: is called with sentences about crashes, for the operator.
        ready: is called with host and port when the front end has answered for the first time.
    """

    def __init__(
        self,
        front_end: FrontEnd,
        listener: socket.socket,
        *,
        node: str,
        budgets: Budgets,
        poller: zmq.Poller,
        note: Callable[[str], None],
        ready: Callable[[str, int], None],
    ) -> None:
        places = {
            "{fd}": str(listener.fileno()),
            "{node}": node,
            "{grace}": str(budgets.stop_s),  # its streams end when their workers' time is over
        }
        self._command = [_filled(argument, places) for argument in front_end.command]
        self._host = front_end.host
        self._listener = listener
        self._budgets = budgets
        self._poller = poller
        self._note = note
        self._ready = ready
        self._process: subprocess.Popen[bytes] | None = None
        self._probe: LivezProbe | None = None
        self._started_at = 0.0
        self._act_at = 0.0
        self._failures = 0
        self._answered = False
        self._stopping = False

    @property
    def gone(self) -> bool:
        return self._stopping and self._process is None

    @property
    def stopping(self) -> bool:
        return self._stopping

    @property
    def due(self) -> float:
        """The time at which :meth:`tick` has to start, probe or kill the front end next."""
        return self._act_at

    def tick(self, now: float) -> None:
        """Handles an exit of the front end or an answer to the probe, and starts, probes or kills
        the front end if this is due."""
        if self._process is not None and (status := self._process.poll()) is not None:
            self._ended(self._process, status, now)
        if self._probe is not None:
            self._poll_probe(self._probe, now)
        if now < self._act_at:
            return
        self._act_at = float("inf")
        if self._process is None:
            if not self._stopping:
                self._start(now)
        elif self._stopping:
            self._process.kill()
        elif not self._answered:
            self._probe = LivezProbe(self._listener, self._poller)

    def stop(self, now: float, *, hurry: bool) -> None:
        """Asks the front end to finish its requests and exit, or kills it if ``hurry``."""
        self._stopping = True
        self._act_at = now + self._budgets.stop_s + self._budgets.leave_s
        if self._process is not None:
            (self._process.kill if hurry else self._process.terminate)()

    def kill(self) -> None:
        """Kills the front end and waits until it is gone."""
        self._stopping = True
        if self._process is not None:
            self._process.kill()
            self._ended(self._process, self._process.wait(), 0.0)

    def _start(self, now: float) -> None:
        self._started_at = now
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,  # its end tells the front end that the reaper is gone
                pass_fds=(self._listener.fileno(),),
                start_new_session=True,
            )
        except OSError as error:
            self._retry(f"the front end cannot be started: {error}", now)
            return
        if not self._answered:
            self._probe = LivezProbe(self._listener, self._poller)

    def _ended(self, process: subprocess.Popen[bytes], status: int, now: float) -> None:
        self._process = None
        if process.stdin is not None:
            process.stdin.close()
        if self._probe is not None:
            self._probe.close()
            self._probe = None
        if not self._stopping:
            self._retry(f"the front end ended: {describe_status(status)}", now)

    def _retry(self, what: str, now: float) -> None:
        budgets = self._budgets
        if now - self._started_at >= budgets.steady_s:
            self._failures = 0
        self._failures += 1
        wait = 0.0
        if not self._answered or self._failures > 1:
            jitter = random.random()  # noqa: S311
            wait = backoff_s(self._failures, budgets.retry_s, budgets.retry_max_s, jitter)
        self._act_at = now + wait
        if self._failures > 1:
            what = f"{what}, {self._failures} times in a row"
        self._note(f"{what}; a new one starts " + (f"in {wait:.1f} s" if wait else "at once"))

    def _poll_probe(self, probe: LivezProbe, now: float) -> None:
        answered = probe.step()
        if answered is None:
            return
        probe.close()
        self._probe = None
        if not answered:
            self._act_at = min(self._act_at, now + PROBE_AGAIN_S)
        elif not self._answered:
            self._answered = True
            self._ready(self._host, self._listener.getsockname()[1])


class LivezProbe:
    """One GET /livez request to the front end that never blocks. The poller wakes the reaper when
    the request can go on."""

    REQUEST = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"

    def __init__(self, listener: socket.socket, poller: zmq.Poller) -> None:
        self._poller = poller
        self._asked = False
        self._socket = socket.socket(listener.family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.connect_ex(listener.getsockname())  # to a wildcard: to this host
        poller.register(self._socket, zmq.POLLOUT)

    def step(self) -> bool | None:
        """Goes on with the request as far as possible. Returns True if it was answered, False if it
        failed, None while it is under way."""
        try:
            if not self._asked:
                self._socket.sendall(self.REQUEST)
                self._asked = True
                self._poller.register(self._socket, zmq.POLLIN)
            return self._socket.recv(16).startswith(b"HTTP/")
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return False

    def close(self) -> None:
        self._poller.unregister(self._socket)
        self._socket.close()


def _filled(argument: str, places: dict[str, str]) -> str:
    for place, value in places.items():
        argument = argument.replace(place, value)
    return argument
