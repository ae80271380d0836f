"""A front end's process: its settings, its listening sockets, and serving on these sockets.

A front end starts in two ways. ``mayfly front`` calls :func:`serve` with a socket that it opens, or
with the sockets that systemd passes to it. A reaper (the process that starts and watches workers)
runs ``python -m mayfly_server.front --node ADDRESS --fd N``, where N is an inherited socket, and
keeps the other end of the front end's stdin open. When stdin ends, the reaper is dead, and the
front end exits at once, so that the workers lose their clients and exit, too.

With socket activation, systemd opens the listening sockets and passes them as file descriptors from
3 on: ``LISTEN_FDS`` is their number, ``LISTEN_PID`` the process that they are for
(sd_listen_fds(3)). The sockets stay open while a front end is replaced, so that clients wait in the
sockets' queues instead of being refused.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import socket
import sys
import threading
from collections.abc import MutableMapping, Sequence
from dataclasses import replace

import structlog
from pydantic import TypeAdapter
from pydantic_core import from_json

from mayfly_protocol.common import limits, logs
from mayfly_protocol.lifecycle import Exit
from mayfly_protocol.transport.addresses import AddressError
from mayfly_protocol.transport.keys import IdentityError
from mayfly_protocol.transport.listening import listen
from mayfly_server.app import create_app
from mayfly_server.http.api_keys import KeysError, exposed_address, from_environment, keys_needed
from mayfly_server.settings import FrontSettings
from mayfly_server.uvicorn_server import FrontServer

FIRST_FD = 3
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
_LOGGED_BY_APP = (
    "Exception in ASGI application",
    "ASGI callable returned without completing response",
)
_NAME = "mayfly_server.front"
"""Name of this module's logger. ``__name__`` is not used, since it may be ``__main__``."""


class FrontError(Exception):
    """The front end cannot start. The text tells the operator why."""


class ListenError(FrontError):
    """The front end has no socket to serve on. The text names the socket's address or descriptor,
    and the reason."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    inherited = options.fd is not None
    try:
        if inherited:
            listeners = [socket.socket(fileno=options.fd)]
            threading.Thread(target=_exit_with_parent, name="death pipe", daemon=True).start()
        else:
            listeners = own_listeners(options.host, options.port)
        serve(_settings(options), listeners, inherited=inherited)
    except FrontError as error:
        sys.exit(str(error))


def serve(
    settings: FrontSettings, listeners: list[socket.socket], *, inherited: bool = False
) -> None:
    """Runs the front end on listening sockets until a signal ends it. The start is logged, unless
    the socket is ``inherited``: the parent process that opened the socket logs the start itself.

    Raises:
        FrontError: the settings cannot be used, or the server has no API keys and other machines
            could reach it.
    """
    logs.configure(settings.logs)
    logging.getLogger("uvicorn.error").addFilter(_is_not_logged_yet)
    try:
        keys = from_environment(os.environ)
        app = create_app(settings, keys)
    except (KeysError, IdentityError, AddressError) as error:
        raise FrontError(str(error)) from error
    exposed = [address for address in map(exposed_address, listeners) if address is not None]
    if exposed and not (settings.insecure or keys or settings.api_keys_file):
        raise FrontError(keys_needed(exposed[0]))
    log = structlog.get_logger(_NAME)
    if exposed and not settings.insecure:
        log.warning(
            "API keys and texts cross the network unencrypted: listen on a loopback address and "
            "put a proxy with TLS in front (docs/edge.md), unless the network is trusted",
            address=exposed[0],
        )
    if not inherited:
        addresses = [listener.getsockname()[:2] for listener in listeners]
        nodes = [node.rpartition("@")[2] for node in settings.nodes]
        log.info("front end starts", addresses=addresses, nodes=nodes)
    # Imported objects stay for good. A garbage collection that visits them would stop all streams.
    gc.freeze()
    FrontServer(app, _within_open_files(settings)).run(sockets=listeners)


def own_listeners(host: str, port: int) -> list[socket.socket]:
    """The listening sockets that systemd passes to this process; if it passes none, a new socket
    that listens at this address. Raises ListenError."""
    handed = activated(os.environ, pid=os.getpid())
    if handed:
        return handed
    try:
        return [listen(host, port)]
    except OSError as error:
        reason = error.strerror or error
        raise ListenError(f"cannot listen on {host} port {port}: {reason}") from error


def activated(
    environ: MutableMapping[str, str], *, pid: int, first: int = FIRST_FD
) -> list[socket.socket]:
    """The listening sockets that systemd passed to the process ``pid``, as descriptors from
    ``first`` on; an empty list if it passed none. systemd's variables are removed from ``environ``,
    because they are not meant for child processes.

    Raises:
        ListenError: a descriptor is not a listening TCP socket.
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
    """The listening TCP socket with this file descriptor. Raises ListenError if it is none."""
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


def _within_open_files(settings: FrontSettings) -> FrontSettings:
    """Returns the settings with no more connections than the process may have files open."""
    wanted, files = settings.connections, limits.raise_open_file_limit()
    affordable = wanted.within(files)
    if affordable != wanted:
        structlog.get_logger(_NAME).warning(
            "max_connections lowered to the limit on open files: raise the hard limit (ulimit -Hn, "
            "LimitNOFILE of a unit)",
            connections=affordable.max_connections,
            wanted=wanted.max_connections,
            open_files=files,
        )
    return replace(settings, connections=affordable)


def _is_not_logged_yet(record: logging.LogRecord) -> bool:
    """A filter of uvicorn's log. False for exceptions and interrupted answers, because the
    application logs these itself, with the request's id."""
    return not str(record.msg).startswith(_LOGGED_BY_APP)


def _settings(options: argparse.Namespace) -> FrontSettings:
    given = from_json(options.settings)
    settings = TypeAdapter(FrontSettings).validate_python({**given, "nodes": options.node})
    return settings if options.grace is None else replace(settings, grace_s=options.grace)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mayfly_server.front", description=__doc__)
    parser.add_argument("--node", action="append", required=True, help="control address of a node")
    parser.add_argument("--fd", type=int, help="file descriptor of an inherited listening socket")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--grace", type=float, help="seconds that streams may go on after SIGTERM")
    parser.add_argument(
        "--settings",
        default="{}",
        help="settings that differ from the defaults of FrontSettings, as JSON",
    )
    return parser


def _exit_with_parent() -> None:
    """Waits for the end of stdin, a pipe from the parent process (the reaper, which starts and
    watches workers) to which nothing is ever written, and exits: the pipe ends when the reaper
    dies."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    structlog.get_logger(_NAME).warning("front end exits: the reaper that started it has exited")
    os._exit(Exit.ORPHANED)


if __name__ == "__main__":
    main()
