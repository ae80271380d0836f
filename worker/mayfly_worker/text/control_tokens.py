"""Encodes prompts so that text from a request cannot forge the chat template's control tokens.

Where a message, a tool or a template variable contains the text of a control token
(``<|im_start|>``), the text is encoded as several ordinary tokens. Assistant messages are the
exception, since the model itself may have written the markers in them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from mayfly_worker.text.detokenize import hugging_face
from mayfly_worker.text.markers import marker_strings

BREAK = "\U000f0000"
"""Private-use character that splits a prompt: no token of the encoded prompt reaches across it."""


@lru_cache(maxsize=8)
def control_tokens(tokenizer: Any) -> re.Pattern[str]:
    """Returns a pattern of the tokens that structure a prompt: special tokens, and added tokens
    that occur in the chat template or in a marker of reasoning or tool calls. Added tokens that
    templates also use as plain text (``\\n``) are left out."""
    inner = hugging_face(tokenizer)
    template = inner.chat_template
    templates = template.values() if isinstance(template, dict) else [template or ""]
    written = "\0".join([*templates, *marker_strings(tokenizer)])
    tokens = [
        token.content
        for token in inner.added_tokens_decoder.values()
        if len(token.content) > 1
        and not token.content.isspace()
        and (token.special or token.content in written)
    ]
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def break_control_tokens(value: Any, control: re.Pattern[str]) -> Any:
    """Puts a character that splits the prompt (:data:`BREAK`) after the first character of each
    control token in a value's strings, so that the strings are encoded without control tokens."""
    if isinstance(value, str):
        text, found = value.replace(BREAK, ""), 1
        while found:  # the rest of a broken token may hold another
            text, found = control.subn(lambda match: f"{match[0][0]}{BREAK}{match[0][1:]}", text)
        return text
    if isinstance(value, Mapping):
        return {key: break_control_tokens(item, control) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [break_control_tokens(item, control) for item in value]
    return value


def encode(text: str, tokenizer: Any) -> list[int]:
    """Encodes a rendered chat as token ids, piece by piece between the characters that split it
    (:data:`BREAK`). No special tokens are added, since the template has written all of them."""
    first, *others = text.split(BREAK)
    ids: list[int] = tokenizer.encode(first, add_special_tokens=False)
    for piece in others:
        ids += _encode_inside(piece, tokenizer)
    return ids


def _encode_inside(piece: str, tokenizer: Any) -> list[int]:
    """Encodes a piece of text that follows other text. Some tokenizers put a space at the beginning
    of a text, so the piece is encoded after a newline, whose ids are then taken off."""
    newline: list[int] = tokenizer.encode("\n", add_special_tokens=False)
    ids: list[int] = tokenizer.encode("\n" + piece, add_special_tokens=False)
    if ids[: len(newline)] == newline:
        return ids[len(newline) :]
    return list(tokenizer.encode(piece, add_special_tokens=False))
