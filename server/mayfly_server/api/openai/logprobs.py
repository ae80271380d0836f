"""Log probabilities of tokens in the forms of OpenAI's APIs.

Answers of chat completions and responses have a list of objects, one for each token. Answers of
completions have four parallel lists, in which a token that is not whole UTF-8 is written
``bytes:\\xf0\\x9f`` and offsets count the text's characters.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from mayfly_protocol.serving import Delta, TokenLogprob, TopLogprob
from mayfly_server.api.openapi import AnswerObject

_IMPOSSIBLE = -9999.0
"""OpenAI's value for a token that cannot be drawn, since JSON has no minus infinity."""


class ChatTopLogprob(AnswerObject):
    token: str
    logprob: float
    bytes: Annotated[
        list[int],
        Field(description="The token's UTF-8; may begin or end within a character."),
    ]


class ChatTokenLogprob(ChatTopLogprob):
    top_logprobs: list[ChatTopLogprob]


class TextLogprobs(AnswerObject):
    """Log probabilities in an answer of ``/v1/completions``: four lists with one entry for each
    token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(AnswerObject):
    """A token that may stand at one position of a prompt, as in vLLM's answers."""

    logprob: float
    rank: Annotated[int | None, Field(description="1 is the likeliest token.")]
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt, the token and the likeliest others by their ids; None for the first
token, which nothing predicts."""


def prompt_logprobs(tokens: Iterable[TokenLogprob]) -> PromptLogprobs:
    return [None if token.logprob is None else _ranked(token, token.logprob) for token in tokens]


def _ranked(token: TokenLogprob, logprob: float) -> dict[str, PromptLogprob]:
    found: dict[str, PromptLogprob] = {
        str(token.id): {
            "logprob": _finite(logprob),
            "rank": token.rank,
            "decoded_token": token.text,
        }
    }
    for rank, other in enumerate(token.top, start=1):
        found.setdefault(
            str(other.id),
            {"logprob": _finite(other.logprob), "rank": rank, "decoded_token": other.text},
        )
    return found


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _IMPOSSIBLE


def chat_logprobs(tokens: Iterable[TokenLogprob]) -> list[ChatTokenLogprob]:
    return [
        {
            "token": token.text,
            "logprob": _IMPOSSIBLE if token.logprob is None else _finite(token.logprob),
            "bytes": list(token.raw),
            "top_logprobs": [
                {
                    "token": other.text,
                    "logprob": _finite(other.logprob),
                    "bytes": list(other.raw),
                }
                for other in token.top
            ],
        }
        for token in tokens
    ]


class AnswerLogprobs:
    """Picks the log probabilities of one choice's answer. Those of tokens whose text is held back
    come with the text; those of thoughts, tool calls and markers are left out."""

    def __init__(self) -> None:
        self._pending: list[ChatTokenLogprob] = []

    def of_text(self, delta: Delta) -> list[ChatTokenLogprob]:
        """The log probabilities that belong to a delta's text. Takes the choice's deltas in
        order."""
        self._pending += chat_logprobs(delta.logprobs)
        found: list[ChatTokenLogprob] = []
        if delta.text:
            found, self._pending = _tokens_of(self._pending, delta.text)
        elif delta.reasoning or delta.tool_calls:
            self._pending = []
        return found


def _tokens_of(
    tokens: list[ChatTokenLogprob], text: str
) -> tuple[list[ChatTokenLogprob], list[ChatTokenLogprob]]:
    """Returns those of ``tokens`` that have the text, and those after them, whose text is held
    back. The ones before are of a thought or markers. A text may begin with an empty line that
    parts it from a message before, and that no token has; tokens that are no whole characters may
    have another text."""
    raw = [bytes(token["bytes"]) for token in tokens]
    for wanted in (text.encode(), text.lstrip("\n").encode()):
        if wanted and wanted in b"".join(raw):
            start, end = 0, len(raw)
            while wanted in b"".join(raw[start + 1 :]):
                start += 1
            while wanted in b"".join(raw[start : end - 1]):
                end -= 1
            return tokens[start:end], tokens[end:]
        if (apart := _apart(raw, wanted)) is not None:
            return [tokens[at] for at in apart], tokens[apart[-1] + 1 :]
    return tokens, []


def _apart(raw: list[bytes], wanted: bytes) -> list[int] | None:
    """Returns the places of the tokens that together are ``wanted``, with markers between them;
    None if there are none such."""
    found: list[int] = []
    for at in range(len(raw) - 1, -1, -1):
        if raw[at] and wanted.endswith(raw[at]):
            found.insert(0, at)
            wanted = wanted[: -len(raw[at])]
    return found if found and not wanted else None


def empty_lists() -> TextLogprobs:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


class TextLogprobsWriter:
    """Writes one choice's log probabilities in the form of ``/v1/completions``; counts the
    characters of the choice's text so far, for the tokens' offsets."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def append(self, tokens: Iterable[TokenLogprob], lists: TextLogprobs) -> None:
        """Appends the choice's next tokens to ``lists``. Tokens have to come in the order of the
        text."""
        for token in tokens:
            logprob = None if token.logprob is None else _finite(token.logprob)
            lists["tokens"].append(_token_name(token))
            lists["token_logprobs"].append(logprob)
            lists["top_logprobs"].append(_top(token))
            lists["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(token.raw))


def _top(token: TokenLogprob) -> dict[str, float] | None:
    """Log probabilities of the likeliest tokens at one position and of the sampled token, by the
    tokens' text; None if the sampled token's log probability is unknown."""
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
