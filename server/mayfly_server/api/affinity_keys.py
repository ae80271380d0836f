"""Affinity keys: requests with the same key go to the same worker, whose prefix cache holds the
text that they begin with."""

from __future__ import annotations

import hashlib
from typing import Any

from mayfly_protocol.requests import TextPrompt, TokenPrompt
from mayfly_server.http import sse

_TEXT_HEAD = 512
_TOKENS_HEAD = 128


def named_key(name: str) -> bytes:
    """The key of a conversation that its client has named."""
    return _digest("name", name)


def chat_key(messages: tuple[dict[str, Any], ...]) -> bytes:
    """The key of the messages that all turns of a conversation begin with: those up to the first
    one of the user's."""
    ends = (i + 1 for i, message in enumerate(messages) if message["role"] == "user")
    return _digest("chat", sse.encode(messages[: next(ends, 1)]))


def prompt_key(prompt: TextPrompt | TokenPrompt) -> bytes:
    """The key of a prompt's beginning."""
    match prompt:
        case TextPrompt(text):
            return _digest("text", text[:_TEXT_HEAD])
        case TokenPrompt(ids):
            return _digest("tokens", str(ids[:_TOKENS_HEAD]))


def _digest(kind: str, content: str) -> bytes:
    return hashlib.blake2b(f"{kind}\0{content}".encode(), digest_size=16).digest()
