"""The check of the ``Host`` header, against DNS rebinding.

The owner of a web site can make the site's name resolve to 127.0.0.1, so that the site's page talks
to a server on the visitor's machine. The page cannot change the ``Host`` header that the browser
sends.

If no API key protects the server, or if host names are configured, ``Host`` has to be one of

- ``localhost``, a name that ends in ``.localhost``, or a loopback address,
- this machine's host name, without its domain, too, and in ``.local``,
- any IP address, if the connection did not come in at the loopback interface (an address cannot be
  rebound),
- a configured name; ``*.example.com`` means every name below example.com, and ``*`` any name.

Other requests are answered 421. A request of HTTP/1.1 without exactly one ``Host`` is answered 400;
a request of HTTP/1.0 may lack the header, since browsers stopped to use that version long ago.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from mayfly_protocol.transport.addresses import is_ip_address, is_loopback
from mayfly_server.errors import InvalidRequest, Misdirected
from mayfly_server.http.errors import error_response

_HOST = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9_.-]{1,255})(?::\d{1,5})?")


def host_name(header: str) -> str | None:
    """The host name or IP address in a ``Host`` header, without port and brackets; None if the
    header is malformed."""
    found = _HOST.fullmatch(header.strip().lower())
    return found[1].strip("[]").rstrip(".") if found else None


def own_names() -> frozenset[str]:
    """The names of this machine, for a host name ``mac.example.com``: ``mac.example.com``, ``mac``
    and ``mac.local``."""
    name = socket.gethostname().lower().rstrip(".")
    first = name.partition(".")[0]
    return frozenset({name, first, f"{first}.local"}) if first else frozenset()


class HostPolicy:
    """The host names that requests may be for, as a protection against DNS rebinding. ``allowed``
    are the configured names (``*.example.com`` and ``*`` included), ``own`` this machine's
    names."""

    def __init__(self, allowed: Sequence[str], own: frozenset[str]) -> None:
        self._allows_all = "*" in allowed
        self._names = own | {name.lower() for name in allowed if not name.startswith("*")}
        self._parents = tuple(name[1:].lower() for name in allowed if name.startswith("*."))

    def allows(self, host: str, local_address: str | None) -> bool:
        """True if a request may be for ``host``. ``local_address`` is this machine's address at
        which the connection came in."""
        if self._allows_all or host in self._names or host.endswith(self._parents):
            return True
        if host == "localhost" or host.endswith(".localhost") or is_loopback(host):
            return True
        beyond = local_address is not None and not is_loopback(local_address)
        return beyond and is_ip_address(host)


class TrustedHosts:
    """Middleware that answers 421 to requests whose ``Host`` header the policy does not allow, and
    400 if the header is missing or malformed."""

    def __init__(self, app: ASGIApp, policy: HostPolicy) -> None:
        self._app = app
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await error_response(refusal, scope, close=True)(scope, receive, send)

    def _refusal(self, scope: Scope) -> InvalidRequest | None:
        given = [value for name, value in scope["headers"] if name == b"host"]
        if not given and scope["http_version"] == "1.0":
            return None
        host = host_name(given[0].decode("latin-1")) if len(given) == 1 else None
        if host is None:
            return InvalidRequest("A request needs one Host header with a name or an address.")
        local_address = scope["server"][0] if scope.get("server") else None
        if not self._policy.allows(host, local_address):
            return Misdirected(
                "This server does not answer for that host; --allowed-hosts makes it."
            )
        return None
