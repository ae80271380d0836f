"""Sends the text that workers generate to the HTTP client, whole or as a stream; shared by the APIs
of OpenAI and Anthropic, each of which brings its own writer of events and objects.

::

    start ---- error ----> status and envelope
      |
      | accepted
      v
    200, headers (streamed)          ---- error ----> error event, end of the stream
      | chunk ... comment or ping ... chunk
      v
    end of the stream, in the API's own way

An answer that is not streamed sends nothing before its end, so an error at any time is answered
with the error's own HTTP status. The relays (objects that each run one prompt on a worker) are
closed in any case, also when the client disconnects or stops reading.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Protocol

import structlog
from fastapi import Response
from starlette.types import Message, Receive, Scope, Send

from mayfly_protocol.requests import Generation
from mayfly_protocol.serving import Delta, Progress, Usage
from mayfly_server.api.dependencies import Front
from mayfly_server.dispatch.mailbox import Mailbox
from mayfly_server.dispatch.relay import Event, Relay, Waiting
from mayfly_server.errors import RequestError, UnreadableCall
from mayfly_server.http import sse
from mayfly_server.http.errors import internal_error, log_failure

_log = structlog.get_logger(__name__)

_COMMENT_INTERVAL_S = 1.0
"""Seconds without a byte sent, after which a stream gets a comment that keeps its connection
open."""
_EVER_S = 3600.0

Arrivals = AsyncGenerator[tuple[int, list[Event]], None]
"""Lists of a request's events (text, prefill progress) as they arrive; the number beside a list is
the index of the prompt that the events belong to."""


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """A client's request to generate text: one generation for each prompt, all with one model.

    ``prefix`` is the beginning of the answer's id, such as "chatcmpl-". Requests with an equal
    ``key`` go to the same worker. ``tenant`` is the name of the caller's API key.
    """

    front: Front
    generations: Sequence[Generation]
    prefix: str
    key: bytes
    tenant: str


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that every chunk of an answer repeats. ``created`` is in seconds since 1970;
    ``fingerprint`` identifies the model's files; ``prompt_tokens`` is the sum over all prompts of
    the request, and ``prompt_ids`` are their token ids if the request asks for them."""

    id: str
    created: int
    model: str
    fingerprint: str | None
    prompt_tokens: int
    prompt_ids: Sequence[Sequence[int]] = ()


class Chunks(Protocol):
    """Writer of an API's server-sent events: turns deltas (pieces of generated text) into the
    stream's text. ``prompt`` is the index of the delta's prompt in the request."""

    def begin(self) -> str:
        """The server-sent events before the first piece of generated text; may be empty."""

    def chunk(self, prompt: int, delta: Delta) -> str:
        """The server-sent events for one piece of generated text; empty if the piece adds nothing
        that the client sees."""

    def alive(self, note: str) -> str:
        """A sign of life while there is nothing to say: a comment, or an event that clients of the
        API know and ignore."""

    def end(self, usage: Usage) -> str:
        """The server-sent events after the last piece of generated text."""

    def failure(self, error: RequestError) -> str:
        """The server-sent events with which a stream that failed ends."""


class Body(Protocol):
    """Collects deltas (pieces of generated text) into an API's one JSON object."""

    def add(self, prompt: int, delta: Delta) -> None: ...

    def content(self, usage: Usage) -> Mapping[str, object]: ...


class _Gone(Exception):
    """Raised when the client has closed its connection before the answer's end."""


class _TooSlow(Exception):
    """Raised when the client reads its answer so slowly that too much waits to be sent."""


class _Answer(Response):
    """A response that runs each prompt of the request on a worker, to the end unless the client
    disconnects; subclasses send the text."""

    def __init__(self, job: GenerationJob) -> None:
        super().__init__()
        self._metrics = job.front.metrics
        self._model = job.generations[0].model
        self._id = f"{job.prefix}{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._outcome = "200"
        self._ended = False
        self._overfull = asyncio.Event()
        several = len(job.generations) > 1
        self._relays = [
            Relay(
                job.front.fleet,
                job.front.settings,
                job.front.metrics,
                rid=f"{self._id}-{i}" if several else self._id,
                generation=generation,
                key=job.key,
                tenant=job.tenant,
                overfull=self._overfull,
            )
            for i, generation in enumerate(job.generations)
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _while_connected(receive, self._overfull, self._to_end(send))
        except RequestError as error:
            self._outcome = str(error.status)
            raise
        except _Gone:
            self._outcome = "cancelled"
        except _TooSlow:
            self._outcome = "slow"
            _log.warning("connection cut: the client does not read its answer", rid=self._id)
        except asyncio.CancelledError:
            self._outcome = "cancelled"
            raise
        except Exception:
            self._outcome = "500"
            raise
        finally:
            self._end()

    async def _to_end(self, send: Send) -> None:
        await self._work(send)
        # At once, before any other task runs: a client that has read its whole answer finds the
        # request in the metrics.
        self._end()

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        for relay in self._relays:
            relay.close()
        self._metrics.requests.labels(self._model, self._outcome).inc()

    async def _work(self, send: Send) -> None:
        raise NotImplementedError

    async def _start(self) -> Head:
        """Waits until workers have accepted every prompt, and returns the fields that all chunks of
        the answer repeat. Raises as :meth:`mayfly_server.dispatch.relay.Relay.start`."""
        starts = [asyncio.ensure_future(relay.start()) for relay in self._relays]
        try:
            await asyncio.gather(*starts)
        finally:
            for start in starts:
                start.cancel()
        digest = self._relays[0].digest
        fingerprint = f"fp_{digest[:12]}" if digest else None
        prompt_tokens = sum(relay.prompt_tokens for relay in self._relays)
        prompt_ids = [relay.prompt_ids for relay in self._relays]
        return Head(self._id, self._created, self._model, fingerprint, prompt_tokens, prompt_ids)

    async def _events(self) -> Arrivals:
        """The events of all prompts (text, prefill progress), as they arrive, until every prompt
        has ended. Raises a RequestError if a prompt fails."""
        source = _events_of(self._relays[0]) if len(self._relays) == 1 else _merged(self._relays)
        async with aclosing(source):
            async for prompt, events in source:
                yield prompt, events

    def _usage(self) -> Usage:
        """The token counts summed over all prompts of the request; known once :meth:`_events` has
        ended."""
        total = Usage()
        for relay in self._relays:
            usage = relay.usage
            total = replace(
                total,
                prompt_tokens=total.prompt_tokens + usage.prompt_tokens,
                completion_tokens=total.completion_tokens + usage.completion_tokens,
                cached_tokens=total.cached_tokens + usage.cached_tokens,
                reasoning_tokens=total.reasoning_tokens + usage.reasoning_tokens,
            )
        return total


class WholeAnswer(_Answer):
    """An answer that is not streamed: one JSON object, sent when all prompts have ended."""

    def __init__(self, job: GenerationJob, body: Callable[[Head], Body]) -> None:
        super().__init__(job)
        self._body = body

    async def _work(self, send: Send) -> None:
        body = self._body(await self._start())
        async with aclosing(self._events()) as arrivals:
            async for prompt, events in arrivals:
                for event in events:
                    if isinstance(event, Delta):
                        body.add(prompt, event)
        content = sse.encode(body.content(self._usage())).encode()
        headers = {"content-type": "application/json", "content-length": str(len(content))}
        await send(_head(headers))
        await send(_part(content, more=False))


class StreamedAnswer(_Answer):
    """A streamed answer: server-sent events as text is generated, and a sign of life each second
    while none is, to keep the connection open."""

    def __init__(self, job: GenerationJob, chunks: Callable[[Head], Chunks]) -> None:
        super().__init__(job)
        self._chunks = chunks
        self._sent_at = 0.0

    async def _work(self, send: Send) -> None:
        chunks = self._chunks(await self._start())
        self._sent_at = time.monotonic()
        await send(_head(sse.HEADERS))
        try:
            if begun := chunks.begin():
                await send(_part(begun.encode()))
            await self._relay(chunks, send)
            last = chunks.end(self._usage())
        except RequestError as error:
            last = self._failed(chunks, error)
        except Exception:
            _log.exception(
                "unhandled exception while streaming an answer: the stream ends with an error",
                rid=self._id,
            )
            last = self._failed(chunks, internal_error())
        await send(_part(last.encode(), more=False))

    def _failed(self, chunks: Chunks, error: RequestError) -> str:
        self._outcome = str(error.status)
        self._metrics.rejected(error)
        log_failure(error)
        return chunks.failure(error)

    async def _relay(self, chunks: Chunks, send: Send) -> None:
        async with aclosing(self._events()) as arrivals:
            async for prompt, events in arrivals:
                text, unreadable = "", False
                for event in events:
                    if isinstance(event, Delta):
                        unreadable = _ends_unreadable(event)
                        text += _chunks_of(
                            chunks, prompt, replace(event, finish=None) if unreadable else event
                        )
                        if unreadable:
                            break
                if text := text or self._sign_of_life(chunks, events):
                    self._sent_at = time.monotonic()
                    await send(_part(text.encode()))
                if unreadable:
                    raise UnreadableCall(
                        "The model wrote a tool call that cannot be read, after its beginning had "
                        "been sent. Another try may succeed; without `stream` the call is returned "
                        "as text."
                    )

    def _sign_of_life(self, chunks: Chunks, events: list[Event]) -> str:
        if not events or time.monotonic() - self._sent_at < _COMMENT_INTERVAL_S:
            return ""
        match events[-1]:
            case Progress(prefilled=done, total=total):
                return chunks.alive(f"{done} of {total} prompt tokens")
            case Waiting():
                return chunks.alive("waiting")
            case Delta():
                return chunks.alive("generating")


def _chunks_of(chunks: Chunks, prompt: int, delta: Delta) -> str:
    """The events for a delta. Pieces of a call that was begun before come first: text in the same
    delta follows the call."""
    pieces = list(takewhile(lambda piece: piece.name is None, delta.tool_calls))
    if not pieces or not (delta.text or delta.reasoning):
        return chunks.chunk(prompt, delta)
    before = replace(
        delta,
        ids=(),
        text="",
        reasoning="",
        tool_calls=tuple(pieces),
        logprobs=(),
        prompt_logprobs=(),
        finish=None,
    )
    after = replace(delta, tool_calls=delta.tool_calls[len(pieces) :])
    return chunks.chunk(prompt, before) + chunks.chunk(prompt, after)


def _ends_unreadable(delta: Delta) -> bool:
    """True if a choice ends by a tool call that cannot be read. One that was only cut off, by the
    token limit or by a stop string of the client's, ends the choice as any text does."""
    unfinished = any(piece.unfinished for piece in delta.tool_calls)
    return unfinished and delta.finish == "stop" and delta.stop is None


def _head(headers: dict[str, str]) -> Message:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": 200, "headers": raw}


def _part(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def _events_of(relay: Relay) -> Arrivals:
    async for events in relay.events():
        yield 0, events


async def _merged(relays: Sequence[Relay]) -> Arrivals:
    """The events of several relays (each runs one prompt on a worker) in the order of their
    arrival."""
    arrived: Mailbox[tuple[int, list[Event]]] = Mailbox()

    async def pump(prompt: int, relay: Relay) -> None:
        try:
            async for events in relay.events():
                arrived.put((prompt, events))
                await arrived.taken()  # or events would pile up here while the client reads slowly
        finally:
            arrived.put((prompt, []))  # wakes the reader below

    pumps = {asyncio.create_task(pump(i, relay)) for i, relay in enumerate(relays)}
    try:
        while pumps:
            for item in await arrived.take(_EVER_S):
                yield item
            done = {task for task in pumps if task.done()}
            for task in done:
                task.result()
            pumps -= done
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _while_connected(
    receive: Receive, overfull: asyncio.Event, work: Coroutine[Any, Any, None]
) -> None:
    """Runs ``work`` to its end. Cancels ``work`` and raises _Gone when the client disconnects, or
    _TooSlow when ``overfull`` is set because the client reads too slowly."""
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
