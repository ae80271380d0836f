"""Measures what clients of a server see when its inference process dies or hangs.

Four clients stream short answers one after the other; each waits a second after a failure and asks
again. From the fault on, extra requests are sent until one is answered, and /health is polled.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx
from client import chat, events, has_text, prompts
from servers import Server

CLIENTS = 4
MAX_TOKENS = 32
"""Length of each answer in tokens; a random-weight model never ends an answer earlier."""
STEADY_S = 4.0
AFTER_S = 3.0
"""Seconds for which the clients go on after the server answers again."""
PAUSE_S = 1.0
PROBE_S = 0.1
HEALTH_S = 0.25
HEALTH_WAIT_S = 2.0


FAILURES = ("failed", "cut", "short", "no answer")


@dataclass
class Request:
    began: float
    first: float | None = None
    """Time at which the answer's first text came (monotonic clock, seconds)."""
    ended: float | None = None
    failure: str = ""
    """Empty, or one of FAILURES: ``failed``, an error before the first text; ``cut``, an error
    after the first text; ``short``, a stream that ended properly with too few tokens; ``no
    answer``, still open when the measurement ended."""

    @property
    def served(self) -> bool:
        return self.ended is not None and not self.failure


@dataclass
class Outage:
    """One injected fault and its effects. ``struck`` is the fault's time (monotonic clock,
    seconds); ``requests`` are the clients' requests that were open at that time or began later."""

    struck: float
    back: float | None = None
    """Time of the first text of a request that was sent after the fault (monotonic clock, seconds);
    None if no request was answered within the time limit."""
    requests: list[Request] = field(default_factory=list)
    health: Counter[str] = field(default_factory=Counter)
    """Number of each answer of /health between the fault and ``back``."""
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def seconds(self) -> float | None:
        return None if self.back is None else self.back - self.struck

    @property
    def slowest(self) -> float:
        """Seconds that the slowest of the answered requests took."""
        return max((r.ended - r.began for r in self.requests if r.served and r.ended), default=0.0)

    def count(self, failure: str) -> int:
        return sum(request.failure == failure for request in self.requests)


class Load:
    def __init__(self, server: Server) -> None:
        self._server = server
        self._bodies = _bodies(server.model)
        self._going = True
        self._tasks: list[asyncio.Task[None]] = []
        self.requests: list[Request] = []
        self.errors: Counter[str] = Counter()

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._client()) for _ in range(CLIENTS)]

    async def stop(self, until: float) -> None:
        """Sends no more requests. Waits for open requests to end, until the time ``until``, and
        then cancels those that are still open."""
        self._going = False
        await asyncio.wait(self._tasks, timeout=max(PAUSE_S, until - time.monotonic()))
        await give_up(self._tasks)

    async def _client(self) -> None:
        while self._going:
            request = Request(time.monotonic())
            self.requests.append(request)
            await self.ask(request)
            if request.failure:
                await asyncio.sleep(PAUSE_S)

    async def ask(self, request: Request) -> None:
        told = events("127.0.0.1", self._server.port, next(self._bodies))
        tokens = 0
        try:
            async with contextlib.aclosing(told):
                async for event in told:
                    if request.first is None and has_text(event):
                        request.first = time.monotonic()
                    tokens = max(tokens, (event.get("usage") or {}).get("completion_tokens", 0))
            request.failure = "short" if tokens < MAX_TOKENS else ""
        except (OSError, RuntimeError) as error:
            request.failure = "failed" if request.first is None else "cut"
            self.errors[str(error)] += 1
        except asyncio.CancelledError:
            request.failure = "no answer"
            raise
        finally:
            request.ended = time.monotonic()


def _bodies(model: str) -> Iterator[dict[str, object]]:
    for number in itertools.count():
        [text] = prompts(1, 16, seed=number)
        yield chat(model, text, MAX_TOKENS)


async def give_up(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def strike(server: Server, blow: Callable[[Server], object], wait_s: float) -> Outage:
    """Injects a fault with ``blow`` while clients stream, and watches until the server answers new
    requests and all open ones have ended, for about ``wait_s`` seconds at most.

    Raises:
        RuntimeError: requests failed before the fault was injected.
    """
    load = Load(server)
    load.start()
    await asyncio.sleep(STEADY_S)
    if not load.requests or any(request.failure for request in load.requests):
        await load.stop(0.0)
        raise RuntimeError(f"requests fail without a fault: {load.errors}")
    await asyncio.to_thread(blow, server)
    outage = Outage(time.monotonic())
    health = asyncio.create_task(_health(server, outage))
    await _probe(load, outage, wait_s)
    await give_up([health])
    if outage.back is not None:
        await asyncio.sleep(AFTER_S)
    await load.stop(outage.struck + wait_s)
    outage.requests = [r for r in load.requests if r.ended is None or r.ended >= outage.struck]
    outage.errors = load.errors
    return outage


async def _probe(load: Load, outage: Outage, wait_s: float) -> None:
    """Sends probe requests until a request that began after the fault is answered: a new one
    whenever the last one has failed, or has had no answer for a second."""
    probes: list[Request] = []
    tasks: list[asyncio.Task[None]] = []
    deadline = outage.struck + wait_s
    while outage.back is None and time.monotonic() < deadline:
        probes.append(Request(time.monotonic()))
        tasks.append(asyncio.create_task(load.ask(probes[-1])))
        await asyncio.wait(tasks[-1:], timeout=PAUSE_S)
        if not probes[-1].served:
            await asyncio.sleep(PROBE_S)
        new = [*probes, *(r for r in load.requests if r.began > outage.struck)]
        first = [request.first for request in new if request.first and request.served]
        outage.back = min(first, default=None)
    await give_up(tasks)


async def _health(server: Server, outage: Outage) -> None:
    url = f"http://127.0.0.1:{server.port}/health"
    fresh = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=HEALTH_WAIT_S, limits=fresh) as client:
        while True:
            outage.health[await _word(client, url)] += 1
            await asyncio.sleep(HEALTH_S)


async def _word(client: httpx.AsyncClient, url: str) -> str:
    """The answer of /health as HTTP status and ``status`` field, or the way in which the probe
    failed: "no connection", "no answer", "cut"."""
    try:
        answer = await client.get(url)
    except httpx.ConnectError:
        return "no connection"
    except httpx.TimeoutException:
        return "no answer"
    except httpx.TransportError:
        return "cut"
    word = answer.json().get("status", "") if "json" in answer.headers["content-type"] else ""
    return f"{answer.status_code} {word}".strip()
