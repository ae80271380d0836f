"""Tokenizing and detokenizing: the front end asks any worker of the model, since it has no
tokenizer itself."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from mayfly_protocol.serving import Detokenized, Failed, Inquiry, Rejected, Tokenized
from mayfly_server.dispatch.fleet import Fleet
from mayfly_server.dispatch.link import Link
from mayfly_server.dispatch.mailbox import Mailbox, Message
from mayfly_server.dispatch.rosters import Incarnation
from mayfly_server.errors import InvalidRequest, Overloaded, RequestFailed
from mayfly_server.settings import FrontSettings


async def ask_worker(
    fleet: Fleet, settings: FrontSettings, model: str, question: Callable[[str, int], Inquiry]
) -> Tokenized | Detokenized:
    """Asks workers of a model to tokenize or detokenize a text, one after the other, until one
    answers. A worker that is lost, is about to end or does not answer in time is not asked again.
    ``question(id, number)`` makes the message to the ``number``-th worker that is asked.

    Raises:
        InvalidRequest: the worker says that the question is invalid.
        Overloaded, Unavailable: no worker can answer now.
        RequestFailed: a worker failed while it computed the answer.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + settings.queue_wait_s
    rid, attempt = f"ask-{secrets.token_hex(12)}", 0
    excluded: set[Incarnation] = set()
    while True:
        link = fleet.choose(model, None, refused=excluded)
        if link is None:
            await _wait(fleet, model, until - loop.time())
            continue
        attempt += 1
        answer = await _ask_one(link, question(rid, attempt), settings.accept_wait_s)
        match answer:
            case Tokenized() | Detokenized():
                return answer
            case Rejected(reason="invalid"):
                raise InvalidRequest(answer.message, param=answer.param, code=answer.code)
            case Rejected(reason="full"):
                raise Overloaded(
                    "Too many requests to tokenize or detokenize wait.",
                    retry_after_s=answer.retry_after_s,
                )
            case Failed():
                raise RequestFailed(
                    "The model failed on this request.", code=answer.kind, cause=answer.message
                )
            case _:
                excluded.add(link.incarnation)


async def _ask_one(link: Link, inquiry: Inquiry, patience_s: float) -> Message | None:
    """Asks one worker a question that needs no inference. Returns the answer (``Lost`` if the
    worker is lost); None if none comes within ``patience_s`` seconds."""
    mailbox: Mailbox[Message] = Mailbox()
    link.ask(inquiry, mailbox)
    try:
        messages = await mailbox.take(patience_s)
    finally:
        link.cancel(inquiry.rid, inquiry.attempt)
    return messages[0] if messages else None


async def _wait(fleet: Fleet, model: str, left_s: float) -> None:
    """Waits at most ``left_s`` seconds for a change of the nodes' workers. Raises Unavailable if no
    worker of the model can be expected to be ready within that time."""
    found = fleet.availability(model)
    if fleet.closing or not found.coming or not found.pause_s <= left_s:
        raise found.error(model)
    await fleet.wait_for_change(left_s)
