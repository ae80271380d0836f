"""What waits for a client that reads slowly: fewer, larger messages, and how large they are."""

from __future__ import annotations

from dataclasses import replace

from mayfly_protocol.serving import Delta, TokenLogprob
from mayfly_server.pool.link import Message

MOST_IDS = 256
"""In one joined delta, so that joining token by token stays cheap."""
_MESSAGE_BYTES = 100
_ID_BYTES = 8
_LOGPROB_BYTES = 80


def join(last: Message, new: Message) -> Message | None:
    """One delta that says what two that follow each other say, where there is one.

    Tool calls stay as they are, and so does text that was followed by a thought: a single delta
    has no room for that order.
    """
    if not (isinstance(last, Delta) and isinstance(new, Delta)):
        return None
    follows = (last.rid, last.attempt, last.choice) == (new.rid, new.attempt, new.choice)
    if not follows or last.index + len(last.ids) != new.index or last.finish is not None:
        return None
    if last.tool_calls or new.tool_calls or (last.text and new.reasoning):
        return None
    if len(last.ids) + len(new.ids) > MOST_IDS:
        return None
    return replace(
        new,
        index=last.index,
        ids=last.ids + new.ids,
        text=last.text + new.text,
        reasoning=last.reasoning + new.reasoning,
        logprobs=last.logprobs + new.logprobs,
    )


def weigh(message: Message) -> int:
    """About how many bytes a message holds."""
    if not isinstance(message, Delta):
        return _MESSAGE_BYTES
    text = len(message.text) + len(message.reasoning)
    calls = sum(len(call.arguments) + _MESSAGE_BYTES for call in message.tool_calls)
    logprobs = sum(map(_weigh_logprob, message.logprobs))
    return text + _ID_BYTES * len(message.ids) + calls + logprobs


def _weigh_logprob(logprob: TokenLogprob) -> int:
    return _LOGPROB_BYTES * (1 + len(logprob.top))
