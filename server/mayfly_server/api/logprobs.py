"""Log probabilities in the shapes of the two APIs.

Chat completions carry a list of objects. Completions carry four parallel lists, in which a token
that is not whole UTF-8 is written ``bytes:\\xf0\\x9f`` and offsets count characters of the text.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable
from typing import Any

from mayfly_protocol.serving import TokenLogprob, TopLogprob

_NEVER = -9999.0
"""What OpenAI's API says for a token that cannot be: JSON has no minus infinity."""


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _NEVER


def chat_logprobs(tokens: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    return [
        _chat_token(token) | {"top_logprobs": [_chat_token(other) for other in token.top]}
        for token in tokens
    ]


def _chat_token(token: TokenLogprob | TopLogprob) -> dict[str, Any]:
    logprob = _NEVER if token.logprob is None else _finite(token.logprob)
    return {"token": token.text, "logprob": logprob, "bytes": list(token.raw)}


class CompletionLogprobs:
    """One choice's lists; knows how long its text was before."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def take(self, tokens: Iterable[TokenLogprob]) -> dict[str, list[Any]]:
        """The lists for tokens that follow those of the last call."""
        lists = empty_lists()
        for token in tokens:
            lists["tokens"].append(_token_name(token))
            lists["token_logprobs"].append(
                None if token.logprob is None else _finite(token.logprob)
            )
            lists["top_logprobs"].append(_top(token))
            lists["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(token.raw))
        return lists


def empty_lists() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _top(token: TokenLogprob) -> dict[str, float] | None:
    """The likeliest tokens and, where it is not among them, the chosen one."""
    if token.logprob is None:
        return None
    top = {_token_name(other): _finite(other.logprob) for other in token.top}
    top.setdefault(_token_name(token), _finite(token.logprob))
    return top


def _token_name(token: TokenLogprob | TopLogprob) -> str:
    try:
        return token.raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)
