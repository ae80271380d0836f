"""Questions that any worker of a model can answer, asked until one does."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from mayfly_protocol.serving import Detokenized, Failed, Inquiry, Rejected, Tokenized
from mayfly_server.dispatch.fleet import Fleet
from mayfly_server.dispatch.link import Link, Mailbox, Message
from mayfly_server.dispatch.rosters import Incarnation
from mayfly_server.errors import InvalidRequest, Overloaded, RequestFailed, Unavailable
from mayfly_server.settings import FrontSettings


async def inquire(
    fleet: Fleet, settings: FrontSettings, model: str, question: Callable[[str, int], Inquiry]
) -> Tokenized | Detokenized:
    """The answer to ``question(rid, attempt)``. A worker that is lost, leaves or says nothing is
    left for another one.

    Raises:
        InvalidRequest: the question has no answer.
        Overloaded, Unavailable: nobody can say now.
        RequestFailed: a worker broke down over it.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + settings.queue_wait_s
    rid, attempt = f"ask-{secrets.token_hex(12)}", 0
    unfit: set[Incarnation] = set()
    while True:
        link = fleet.choose(model, None, refused=unfit)
        if link is None:
            await _wait(fleet, model, until - loop.time())
            continue
        attempt += 1
        answer = await _ask(link, question(rid, attempt), settings.accept_wait_s)
        match answer:
            case Tokenized() | Detokenized():
                return answer
            case Rejected(reason="invalid"):
                raise InvalidRequest(answer.message, param=answer.param, code=answer.code)
            case Rejected(reason="full"):
                raise Overloaded("Too many questions wait.", retry_after_s=answer.retry_after_s)
            case Failed():
                raise RequestFailed("The model failed on this request.", code=answer.kind)
            case _:
                unfit.add(link.incarnation)


async def _ask(link: Link, inquiry: Inquiry, patience_s: float) -> Message | None:
    """What the worker says first, and last."""
    mailbox: Mailbox[Message] = Mailbox()
    link.ask(inquiry, mailbox)
    try:
        messages = await mailbox.take(patience_s)
    finally:
        link.abandon(inquiry.rid, inquiry.attempt)
    return messages[0] if messages else None


async def _wait(fleet: Fleet, model: str, left_s: float) -> None:
    """Until something changes, if that is worth waiting for. Raises Unavailable if not."""
    outlook = fleet.outlook(model)
    if fleet.closing or not outlook.coming or not outlook.pause_s <= left_s:
        raise Unavailable(
            f"No worker of {model} is ready: {outlook.reason}.",
            code="model_failed" if outlook.failed else None,
            retry_after_s=outlook.ready_in_s,
        )
    await fleet.changed(left_s)
