"""A front end's process, in two ways.

``mayfly front`` calls :func:`serve` with a socket of its own, or with those that systemd hands to
it. A reaper starts ``python -m mayfly_server.front --node ADDRESS --fd N`` with a socket that is
inherited, and holds the other end of its stdin: when that ends the reaper is dead, and the front
end leaves at once, so that the workers lose their clients and go too.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace

import structlog
from pydantic import TypeAdapter
from pydantic_core import from_json

from mayfly_protocol.common import limits, logs
from mayfly_protocol.lifecycle import Exit
from mayfly_protocol.transport.addresses import AddressError
from mayfly_protocol.transport.keys import IdentityError
from mayfly_server.app import create_app
from mayfly_server.http.api_keys import KeysError, exposed_address, from_environment, keys_needed
from mayfly_server.settings import FrontSettings
from mayfly_server.uvicorn_server import FrontServer, ListenError, activated, bind

_SAID = ("Exception in ASGI application", "ASGI callable returned without completing response")
_NAME = "mayfly_server.front"
"""Also where this is ``__main__``."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    settings = _settings(options)
    if options.fd is None:
        try:
            listeners = own_listeners(options.host, options.port)
        except ListenError as error:
            sys.exit(str(error))
    else:
        listeners = [socket.socket(fileno=options.fd)]
        threading.Thread(target=_leave_with_parent, name="death pipe", daemon=True).start()
    try:
        serve(settings, listeners, inherited=options.fd is not None)
    except FrontError as error:
        sys.exit(str(error))


class FrontError(Exception):
    """What keeps a front end from starting; the text is for the operator."""


def serve(
    settings: FrontSettings, listeners: list[socket.socket], *, inherited: bool = False
) -> None:
    """Serves on listening sockets until a signal says that it is enough. Of one that is
    ``inherited``, somebody else tells.

    Raises:
        FrontError: the settings cannot be used, or others could use this server without a key.
    """
    logs.configure(settings.logs)
    logging.getLogger("uvicorn.error").addFilter(_unsaid)
    try:
        keys = from_environment(os.environ)
        app = create_app(settings, keys)
    except (KeysError, IdentityError, AddressError) as error:
        raise FrontError(str(error)) from error
    open_to_others = [address for address in map(exposed_address, listeners) if address is not None]
    if open_to_others and not (settings.insecure or keys or settings.api_keys_file):
        raise FrontError(keys_needed(open_to_others[0]))
    if not inherited:
        addresses = [listener.getsockname()[:2] for listener in listeners]
        nodes = [node.rpartition("@")[2] for node in settings.nodes]
        log = structlog.get_logger(_NAME)
        log.info("front end starts", addresses=addresses, nodes=nodes)
    # What was imported stays. A full collection that looks at it stops all streams for a while.
    gc.freeze()
    FrontServer(app, _affordable(settings)).run(sockets=listeners)


def _affordable(settings: FrontSettings) -> FrontSettings:
    """With no more connections than the system lets this process have."""
    wanted, files = settings.connections, limits.raise_open_file_limit()
    affordable = wanted.within(files)
    if affordable != wanted:
        structlog.get_logger(_NAME).warning(
            "takes fewer connections than it is set to, for want of open files: raise the hard "
            "limit (ulimit -Hn, LimitNOFILE of a unit)",
            connections=affordable.max_connections,
            wanted=wanted.max_connections,
            open_files=files,
        )
    return replace(settings, connections=affordable)


def own_listeners(host: str, port: int) -> list[socket.socket]:
    """Those that systemd hands over, or else one of this address. Raises ListenError."""
    return activated(os.environ, pid=os.getpid()) or [bind(host, port)]


def _unsaid(record: logging.LogRecord) -> bool:
    """The application has logged its exceptions itself, with their requests' ids, and whom it cut
    in the middle of an answer."""
    return not str(record.msg).startswith(_SAID)


def _settings(options: argparse.Namespace) -> FrontSettings:
    given = from_json(options.settings)
    settings = TypeAdapter(FrontSettings).validate_python({**given, "nodes": options.node})
    return settings if options.grace is None else replace(settings, grace_s=options.grace)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mayfly_server.front", description=__doc__)
    parser.add_argument("--node", action="append", required=True, help="a node's control address")
    parser.add_argument("--fd", type=int, help="an inherited listening socket")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--grace", type=float, help="seconds for streams at SIGTERM")
    parser.add_argument(
        "--settings", default="{}", help="all that differs from FrontSettings' defaults, as JSON"
    )
    return parser


def _leave_with_parent() -> None:
    """Nothing is ever written to this pipe."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    structlog.get_logger(_NAME).warning("the reaper is gone: leaving")
    os._exit(Exit.ORPHANED)


if __name__ == "__main__":
    main()
