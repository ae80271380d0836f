"""HTTP requests to a running server, for subcommands such as ``mayfly status`` and ``mayfly
top``."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mayfly_cli.failure import fail
from mayfly_protocol.common.secrets import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE

if TYPE_CHECKING:
    import httpx

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLES = (ADMIN_KEY_VARIABLE, API_KEY_VARIABLE)
"""Environment variables that may hold the API key to send; the first that is set is used. An
admin's key comes first, since it is valid for every path."""

Url = Annotated[str, typer.Option("--url", help="The server's address.")]


def connect(url: str, *variables: str) -> httpx.Client:
    """Makes an HTTP client for the server at ``url``, which may lack ``http://``. The client sends
    the API key from the environment, if there is one; ``variables`` may name other ones than
    ``KEY_VARIABLES`` to look in. Connecting is limited to 5 s, reading is not. A proxy that the
    environment names is not used for a server that :func:`goes_direct` is true of."""
    import httpx

    names = variables or KEY_VARIABLES
    key = next((os.environ[name] for name in names if os.environ.get(name)), None)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    full = url if "://" in url else f"http://{url}"
    try:
        base = httpx.URL(full)
        # Not trust_env=False, which would ignore SSL_CERT_FILE as well.
        direct = dict.fromkeys(("http://", "https://", "all://")) if goes_direct(base) else None
        return httpx.Client(
            base_url=base,
            headers=headers,
            timeout=httpx.Timeout(None, connect=5.0),
            mounts=direct,
        )
    except (httpx.InvalidURL, ValueError) as error:
        raise typer.BadParameter(
            f"{url!r} is not an address: {error}", param_hint="--url"
        ) from error


def goes_direct(url: httpx.URL) -> bool:
    """True if requests to ``url`` must not go to a proxy, which would see the API key: the host is
    this machine, or ``no_proxy`` names it (by name, domain, address, network or with its port)."""
    import urllib.request  # takes longer than all that a command without a server needs

    host = url.host.lower().rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    port = url.port or {"http": 80, "https": 443}.get(url.scheme, 0)
    if urllib.request.proxy_bypass(f"{host}:{port}"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None) or address
    if mapped.is_loopback or mapped.is_unspecified:
        return True
    return any(address in network for network in _no_proxy_networks())


def _no_proxy_networks() -> Iterator[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    import urllib.request

    for name in urllib.request.getproxies().get("no", "").split(","):
        with suppress(ValueError):
            yield ipaddress.ip_network(name.strip().strip("[]"), strict=False)


def get_json(client: httpx.Client, path: str, *variables: str) -> Any:
    """Returns the parsed JSON answer to ``GET path``. Ends the command with an error if no server
    answers within 10 s, or if the answer is an error or is not JSON. ``variables`` are those that
    :func:`connect` was given."""
    import httpx

    try:
        response = client.get(path, timeout=10.0)
        response.raise_for_status()
        return response.json()
    except httpx.HTTPStatusError as error:
        fail(_refusal(client, path, error.response.status_code, variables or KEY_VARIABLES))
    except ValueError:
        fail(f"{client.base_url} answers {path} with something that is not JSON")
    except httpx.RequestError as error:
        fail(unreachable(client, error))


def get_events(client: httpx.Client, path: str) -> Iterator[str]:
    """Yields the data of each server-sent event at ``path``, until the server ends the stream. Ends
    the command with an error if the server refuses the request or sends no event stream.

    Raises:
        httpx.RequestError: no server answers, the connection is lost, or nothing comes for 10 s.
    """
    with client.stream("GET", path, timeout=10.0) as response:
        if not response.is_success:
            fail(_refusal(client, path, response.status_code, KEY_VARIABLES))
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            fail(f"{client.base_url} answers {path} with something that is no event stream")
        yield from events(response.iter_lines())


def events(lines: Iterable[str]) -> Iterator[str]:
    """Yields the data of each server-sent event in the lines of a stream, parsed as in the HTML
    standard: several ``data`` fields of one event are joined by newlines, comments and other fields
    are skipped, and an event that is not complete at the end of the stream is dropped."""
    data: list[str] = []
    for line in lines:
        if line == "":
            if data:
                yield "\n".join(data)
            data = []
            continue
        field, _, value = line.partition(":")
        if field == "data":
            data.append(value.removeprefix(" "))


def _refusal(client: httpx.Client, path: str, status: int, variables: tuple[str, ...]) -> str:
    if status in (401, 403):
        return (
            f"{client.base_url} does not accept this API key for {path}: "
            f"set {' or '.join(variables)}"
        )
    return f"{client.base_url} answers {path} with HTTP {status}: is that a Mayfly server?"


def unreachable(client: httpx.Client, error: httpx.RequestError) -> str:
    """Returns a sentence for the operator about a request that reached no server."""
    import httpx

    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return f"no server answers at {client.base_url}; `mayfly serve` starts one"
    if isinstance(error, httpx.UnsupportedProtocol):
        return f"{client.base_url} is no http:// or https:// address"
    return f"the connection to {client.base_url} was lost: {error or type(error).__name__}"
