"""The one way from a run to a client's bytes, for every API that generates.

::

    start ---- error ----> status and envelope
      |
      | accepted
      v
    200, headers (streamed)          ---- error ----> error event, end of the stream
      | chunk ... comment ... chunk
      v
    end of the stream, in the API's own way

Not streamed, nothing is sent before the end, so that every error keeps its status. Whatever
happens, a client that goes away or does not read included, the run is closed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any, Protocol

import structlog
from fastapi import Response
from starlette.types import Message, Receive, Scope, Send

from mayfly_protocol.serving import Delta, Progress, Usage
from mayfly_server.api.run import Head, Run
from mayfly_server.dispatch.relay import Event, Waiting
from mayfly_server.errors import RequestError
from mayfly_server.http import sse
from mayfly_server.http.errors import internal_error
from mayfly_server.metrics import Metrics

_log = structlog.get_logger(__name__)

_COMMENT_INTERVAL_S = 1.0
"""Seconds without a byte after which a client may like to know why."""


class Chunks(Protocol):
    """Turns a run into events. ``prompt`` is the number of the prompt that a delta belongs to."""

    def begin(self) -> str:
        """The events before the first delta, if there are any."""

    def chunk(self, prompt: int, delta: Delta) -> str:
        """The events that say what is new; none where there is nothing to say yet."""

    def end(self, usage: Usage) -> str:
        """The events after the last delta."""

    def failure(self, error: RequestError) -> str:
        """The last events of a run that could not go on."""


class Body(Protocol):
    """Collects a run into one JSON object."""

    def add(self, prompt: int, delta: Delta) -> None: ...

    def content(self, usage: Usage) -> dict[str, Any]: ...


class _Gone(Exception):
    """The client has closed its connection."""


class _TooSlow(Exception):
    """The client does not read what it asked for."""


class _Answer(Response):
    """Runs to its end, unless the client goes away."""

    def __init__(self, run: Run, metrics: Metrics) -> None:
        super().__init__()
        self._run = run
        self._metrics = metrics
        self._outcome = "200"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _while_connected(receive, self._run.overfull, self._work(send))
        except RequestError as error:
            self._outcome = str(error.status)
            raise
        except _Gone:
            self._outcome = "cancelled"
        except _TooSlow:
            self._outcome = "slow"
            _log.warning("cut a client that does not read its answer", rid=self._run.id)
        except asyncio.CancelledError:
            self._outcome = "cancelled"
            raise
        except Exception:
            self._outcome = "500"
            raise
        finally:
            self._run.close()
            self._metrics.requests.labels(self._run.model, self._outcome).inc()

    async def _work(self, send: Send) -> None:
        raise NotImplementedError


class WholeAnswer(_Answer):
    """One JSON object at the end."""

    def __init__(self, run: Run, metrics: Metrics, body: Callable[[Head], Body]) -> None:
        super().__init__(run, metrics)
        self._body = body

    async def _work(self, send: Send) -> None:
        body = self._body(await self._run.start())
        async with aclosing(self._run.events()) as arrivals:
            async for prompt, events in arrivals:
                for event in events:
                    if isinstance(event, Delta):
                        body.add(prompt, event)
        content = sse.encode(body.content(self._run.usage)).encode()
        headers = {"content-type": "application/json", "content-length": str(len(content))}
        await send(_head(headers))
        await send(_part(content, more=False))


class StreamedAnswer(_Answer):
    """Server-sent events as there is something to say, and a comment now and then otherwise."""

    def __init__(self, run: Run, metrics: Metrics, chunks: Callable[[Head], Chunks]) -> None:
        super().__init__(run, metrics)
        self._chunks = chunks
        self._sent_at = 0.0

    async def _work(self, send: Send) -> None:
        chunks = self._chunks(await self._run.start())
        self._sent_at = time.monotonic()
        await send(_head(sse.HEADERS))
        try:
            if begun := chunks.begin():
                await send(_part(begun.encode()))
            await self._relay(chunks, send)
            last = chunks.end(self._run.usage)
        except RequestError as error:
            last = self._failed(chunks, error)
        except Exception:
            _log.exception("an error nobody foresaw, in a stream", rid=self._run.id)
            last = self._failed(chunks, internal_error())
        await send(_part(last.encode(), more=False))

    def _failed(self, chunks: Chunks, error: RequestError) -> str:
        self._outcome = str(error.status)
        self._metrics.rejected(error)
        return chunks.failure(error)

    async def _relay(self, chunks: Chunks, send: Send) -> None:
        async with aclosing(self._run.events()) as arrivals:
            async for prompt, events in arrivals:
                text = "".join(
                    chunks.chunk(prompt, event) for event in events if isinstance(event, Delta)
                )
                if text := text or self._comment(events):
                    self._sent_at = time.monotonic()
                    await send(_part(text.encode()))

    def _comment(self, events: list[Event]) -> str:
        if not events or time.monotonic() - self._sent_at < _COMMENT_INTERVAL_S:
            return ""
        match events[-1]:
            case Progress(prefilled=done, total=total):
                return sse.comment(f"{done} of {total} prompt tokens")
            case Waiting():
                return sse.comment("waiting")
        return ""


def _head(headers: dict[str, str]) -> Message:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": 200, "headers": raw}


def _part(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def _while_connected(
    receive: Receive, overfull: asyncio.Event, work: Coroutine[Any, Any, None]
) -> None:
    """Runs ``work`` to its end; cancels it and raises _Gone when the client goes away, _TooSlow
    when too much waits to be read by it."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    waiting = asyncio.create_task(overfull.wait())
    tasks = (working, watching, waiting)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        elif watching.done():
            raise _Gone
        else:
            raise _TooSlow
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
