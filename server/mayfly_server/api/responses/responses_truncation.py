"""Drops the oldest messages of a conversation that is too long for the model, if the request has
``truncation: "auto"``.

What is dropped leaves a conversation that a chat template can render: whole turns first, each a
question with all that was said and done until the next; then, of the last turn, calls of tools with
their results. System messages, the last question and what followed its last call stay.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from mayfly_protocol.requests import ChatPrompt

Messages = Sequence[dict[str, Any]]

ANSWER_SHARE = 8
"""The part of a context, one in so many, that is kept free for the answer if the request does not
say how long it may be."""


def prompt_limit(context: int, max_tokens: int | None) -> int:
    """The most tokens that a prompt may have, so that an answer fits in the context; at least half
    of it."""
    answer = context // ANSWER_SHARE if max_tokens is None else max_tokens
    return context - min(answer, context // 2)


async def shortened(
    prompt: ChatPrompt, limit: int, count: Callable[[ChatPrompt], Awaitable[int]]
) -> ChatPrompt:
    """Drops as few of the oldest messages as bring a prompt down to ``limit`` tokens, or all that
    can be dropped; ``count`` gives the number of a prompt's tokens."""
    if await count(prompt) <= limit:
        return prompt
    groups = _droppable(prompt.messages)
    fewest, most = 1, len(groups)
    while fewest < most:
        middle = (fewest + most) // 2
        if await count(_without(prompt, groups[:middle])) <= limit:
            most = middle
        else:
            fewest = middle + 1
    return _without(prompt, groups[:most])


def _droppable(messages: Messages) -> list[range]:
    """Groups of messages that can be dropped, each together, in this order."""
    begins = [
        at
        for at, message in enumerate(messages)
        if message["role"] == "user" and (at == 0 or messages[at - 1]["role"] != "user")
    ]
    first = next((at for at, message in enumerate(messages) if message["role"] != "system"), 0)
    if not begins or begins[0] != first:
        begins.insert(0, first)
    turns = [range(a, b) for a, b in pairwise(begins)]
    calls = [at for at in range(begins[-1], len(messages)) if messages[at].get("tool_calls")]
    return turns + [range(a, b) for a, b in pairwise(calls)]


def _without(prompt: ChatPrompt, groups: Sequence[range]) -> ChatPrompt:
    dropped = {at for group in groups for at in group}
    kept = tuple(
        message
        for at, message in enumerate(prompt.messages)
        if at not in dropped or message["role"] == "system"
    )
    return replace(prompt, messages=kept)
