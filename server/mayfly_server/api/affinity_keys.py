"""Affinity keys: hashes of a prompt's beginning. Requests with equal keys go to the same worker,
because its prefix cache holds the KV entries of that beginning."""

from __future__ import annotations

import hashlib
from typing import Any

from mayfly_protocol.requests import TextPrompt, TokenPrompt
from mayfly_server.http import sse

_TEXT_HEAD = 512
_TOKENS_HEAD = 128


def named_key(name: str) -> bytes:
    """Hash of the name that a client gave its conversation (``prompt_cache_key``); requests with
    equal keys go to the same worker."""
    return _digest("name", name)


def chat_key(messages: tuple[dict[str, Any], ...]) -> bytes:
    """Hash of the conversation up to and including its first user message; requests with equal keys
    go to the same worker, so all turns of one conversation do."""
    ends = (i + 1 for i, message in enumerate(messages) if message["role"] == "user")
    return _digest("chat", sse.encode(messages[: next(ends, 1)]))


def prompt_key(prompt: TextPrompt | TokenPrompt) -> bytes:
    """Hash of the prompt's first 512 characters, or first 128 token ids; requests with equal keys
    go to the same worker."""
    match prompt:
        case TextPrompt(text):
            return _digest("text", text[:_TEXT_HEAD])
        case TokenPrompt(ids):
            return _digest("tokens", str(ids[:_TOKENS_HEAD]))


def _digest(kind: str, content: str) -> bytes:
    return hashlib.blake2b(f"{kind}\0{content}".encode(), digest_size=16).digest()
