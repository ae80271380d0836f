"""A client's request while it runs: one relay a prompt, and what they have in common."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from mayfly_protocol.requests import Generation
from mayfly_protocol.serving import Usage
from mayfly_server.api.dependencies import Front
from mayfly_server.dispatch.link import Mailbox
from mayfly_server.dispatch.relay import Event, Relay

_EVER_S = 3600.0

Arrivals = AsyncGenerator[tuple[int, list[Event]], None]
"""What happened, and the number of the prompt that it happened to."""


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk of an answer repeats, and how long its prompts are. ``created`` is in
    seconds since 1970."""

    id: str
    created: int
    model: str
    fingerprint: str | None
    prompt_tokens: int


class Run:
    """:meth:`start`, then :meth:`events` to the end, and :meth:`close` in any case. ``overfull`` is
    set when more has happened than may wait for :meth:`events` to be asked for it. ``key`` is the
    conversation's, ``tenant`` the name of the caller's API key."""

    def __init__(
        self,
        front: Front,
        generations: Sequence[Generation],
        *,
        prefix: str,
        key: bytes,
        tenant: str,
    ) -> None:
        self.id = f"{prefix}{secrets.token_hex(12)}"
        self.model = generations[0].model
        self._created = int(time.time())
        several = len(generations) > 1
        self.overfull = asyncio.Event()
        self._relays = [
            Relay(
                front.fleet,
                front.settings,
                front.metrics,
                rid=f"{self.id}-{i}" if several else self.id,
                generation=generation,
                key=key,
                tenant=tenant,
                overfull=self.overfull,
            )
            for i, generation in enumerate(generations)
        ]

    async def start(self) -> Head:
        """Returns when every prompt has been accepted. Raises what
        :meth:`mayfly_server.dispatch.relay.Relay.start` does."""
        starts = [asyncio.ensure_future(relay.start()) for relay in self._relays]
        try:
            await asyncio.gather(*starts)
        finally:
            for start in starts:
                start.cancel()
        digest = self._relays[0].digest
        fingerprint = f"fp_{digest[:12]}" if digest else None
        prompt_tokens = sum(relay.prompt_tokens for relay in self._relays)
        return Head(self.id, self._created, self.model, fingerprint, prompt_tokens)

    async def events(self) -> Arrivals:
        """What happens to the prompts until all have ended. Raises as :meth:`start`."""
        source = self._one() if len(self._relays) == 1 else self._all()
        async with aclosing(source):
            async for prompt, events in source:
                yield prompt, events

    @property
    def usage(self) -> Usage:
        """Of all prompts together; known once :meth:`events` has ended."""
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

    def close(self) -> None:
        for relay in self._relays:
            relay.close()

    async def _one(self) -> Arrivals:
        async for events in self._relays[0].events():
            yield 0, events

    async def _all(self) -> Arrivals:
        arrived: Mailbox[tuple[int, list[Event]]] = Mailbox()

        async def pump(prompt: int, relay: Relay) -> None:
            try:
                async for events in relay.events():
                    arrived.put((prompt, events))
                    await arrived.taken()  # or what a slow reader leaves would pile up here
            finally:
                arrived.put((prompt, []))  # wakes the reader below

        pumps = {asyncio.create_task(pump(i, relay)) for i, relay in enumerate(self._relays)}
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
