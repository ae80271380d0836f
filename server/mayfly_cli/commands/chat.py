"""``mayfly chat``: a conversation with a model in the terminal, over a server's HTTP API."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mayfly_cli.commands.client import DEFAULT_URL, Url, connect, events, get_json, unreachable
from mayfly_cli.failure import fail

if TYPE_CHECKING:
    import httpx

PROMPT = "> "


class AnswerFailed(Exception):
    """The server refused a message or broke an answer off. The text is the server's error
    message."""


def chat(
    url: Url = DEFAULT_URL,
    model: Annotated[
        str, typer.Option("--model", help="The model's name; by default the server's first model.")
    ] = "",
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", help="Sampling temperature; 0 always takes the likeliest token.", min=0
        ),
    ] = 0.0,
) -> None:
    """Talk to a model. Ctrl-C stops an answer, Ctrl-D ends the conversation."""
    import httpx

    with connect(url) as client:
        try:
            name = model or _first_model(client)
            typer.secho(f"Talking to {name}. Ctrl-C stops an answer, Ctrl-D ends.", dim=True)
            _converse(client, {"model": name, "temperature": temperature, "stream": True})
        except (KeyboardInterrupt, EOFError):
            typer.echo()
        except httpx.RequestError as error:
            fail(unreachable(client, error))


def _first_model(client: httpx.Client) -> str:
    models = get_json(client, "/v1/models")
    try:
        return str(models["data"][0]["id"])
    except (LookupError, TypeError):
        fail(f"{client.base_url} serves no model right now; `mayfly status` may show why")


def _converse(client: httpx.Client, parameters: dict[str, Any]) -> None:
    history: list[dict[str, str]] = []
    while True:
        text = _read_message()
        if not text.strip():
            continue
        turn = [*history, {"role": "user", "content": text}]
        try:
            answer = _answer(client, {**parameters, "messages": turn})
        except AnswerFailed as error:
            # The message is dropped with its failed answer, so that it can be sent again.
            typer.secho(f"\n{error}", fg=typer.colors.RED, err=True)
        else:
            if answer:
                history = [*turn, {"role": "assistant", "content": answer}]


def _read_message() -> str:
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives input() line editing and history
    return input(PROMPT)


def _answer(client: httpx.Client, request: dict[str, Any]) -> str:
    """Sends a chat request, prints the answer while it arrives, and returns the answer's text.
    Ctrl-C stops the answer; the text up to then is returned."""
    content = []
    try:
        with client.stream("POST", "/v1/chat/completions", json=request) as response:
            if response.is_error:
                raise AnswerFailed(_error_text(response.read(), response.status_code))
            for delta in deltas(events(response.iter_lines())):
                thought = delta.get("reasoning_content")
                if thought:
                    typer.secho(thought, dim=True, nl=False)
                text = delta.get("content")
                if text:
                    content.append(text)
                    typer.echo(text, nl=False)
    except KeyboardInterrupt:
        pass  # the connection is closed, and so the server stops generating, too
    typer.echo()
    return "".join(content)


def deltas(stream: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yields the deltas (new pieces of the message) in the events of a streamed chat completion.

    Raises:
        AnswerFailed: the stream has an error or an event that is no chat completion, or it ends
            before its ``[DONE]``.
    """
    import json

    for data in stream:
        if data == "[DONE]":
            return
        try:
            chunk = json.loads(data)
            if "error" in chunk:
                raise AnswerFailed(_message(chunk) or data)
            found = [choice["delta"] for choice in chunk["choices"]]
        except (ValueError, LookupError, TypeError) as error:
            raise AnswerFailed(
                f"the server sent an event that is no answer: {data[:200]}"
            ) from error
        yield from found
    raise AnswerFailed("the answer broke off")


def _message(answer: Any) -> str | None:
    """Returns the message in an OpenAI error object; None if ``answer`` is not one."""
    try:
        return str(answer["error"]["message"])
    except (LookupError, TypeError):
        return None


def _error_text(body: bytes, http_status: int) -> str:
    import json

    try:
        message = _message(json.loads(body))
    except ValueError:
        message = None
    return message or f"the server answered with HTTP {http_status}"
