"""HTTP requests of the commands to a running server."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mayfly_cli.failure import fail
from mayfly_protocol.common.secrets import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE

if TYPE_CHECKING:
    import httpx

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLES = (ADMIN_KEY_VARIABLE, API_KEY_VARIABLE)
"""Variables with an API key; the first that is set is sent: an admin's key is valid everywhere."""

Url = Annotated[str, typer.Option("--url", help="The server's address.")]


def connect(url: str) -> httpx.Client:
    """Makes a client for the server at ``url``, which may lack ``http://``, with the API key from
    the environment, if there is one. Only connecting has a time limit, reading has none."""
    import httpx

    key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    full = url if "://" in url else f"http://{url}"
    try:
        return httpx.Client(
            base_url=full, headers=headers, timeout=httpx.Timeout(None, connect=5.0)
        )
    except (httpx.InvalidURL, ValueError) as error:
        raise typer.BadParameter(f"{url!r} is no address: {error}", param_hint="--url") from error


def get_json(client: httpx.Client, path: str) -> Any:
    """Returns the JSON that the server answers to ``GET path``. Ends the command if no server
    answers, or if the answer is not one of a Mayfly server."""
    import httpx

    try:
        response = client.get(path, timeout=10.0)
        response.raise_for_status()
        return response.json()
    except httpx.HTTPStatusError as error:
        fail(_refusal(client, path, error.response.status_code))
    except ValueError:
        fail(f"{client.base_url} answers {path} with something that is not JSON")
    except httpx.RequestError as error:
        fail(unreachable(client, error))


def get_events(client: httpx.Client, path: str) -> Iterator[str]:
    """Yields the data of each server-sent event at ``path``, where one comes every second, until
    the server ends the stream. Ends the command if the server refuses.

    Raises:
        httpx.RequestError: no server answers, or the connection is lost.
    """
    with client.stream("GET", path, timeout=10.0) as response:
        if not response.is_success:
            fail(_refusal(client, path, response.status_code))
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            fail(f"{client.base_url} answers {path} with something that is no event stream")
        yield from events(response.iter_lines())


def events(lines: Iterable[str]) -> Iterator[str]:
    """Yields the data of each server-sent event in a stream's lines, parsed as in the HTML
    standard: several ``data`` fields of one event are joined by newlines, comments and other fields
    skipped, and an event that the stream's end cuts off is dropped."""
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


def _refusal(client: httpx.Client, path: str, status: int) -> str:
    if status in (401, 403):
        return (
            f"{client.base_url} does not accept this API key for {path}: "
            f"set {' or '.join(KEY_VARIABLES)}"
        )
    return f"{client.base_url} answers {path} with HTTP {status}: is that a Mayfly server?"


def unreachable(client: httpx.Client, error: httpx.RequestError) -> str:
    """Explains a request that reached no server, and says what to do."""
    import httpx

    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return f"no server answers at {client.base_url}; `mayfly serve` starts one"
    if isinstance(error, httpx.UnsupportedProtocol):
        return f"{client.base_url} is no http:// or https:// address"
    return f"the connection to {client.base_url} was lost: {error or type(error).__name__}"
