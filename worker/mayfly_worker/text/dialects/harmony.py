"""Harmony, in which OpenAI's gpt-oss models write: an answer is a row of messages with headers.

::

    <|start|>assistant<|channel|>analysis<|message|>a thought<|end|>
    <|start|>assistant<|channel|>commentary<|message|>content before calls<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>content<|return|>

The recipient may also stand before the channel. Prompts end with ``<|start|>assistant``, so that an
answer begins within a header. ``<|call|>`` and ``<|return|>`` end the answer, ``<|end|>`` does not.
Models leave out parts of headers now and then, and the text of every message is kept nonetheless.
"""

from __future__ import annotations

import json
import re
from typing import Any

from mayfly_worker.text.dialects.call_readers import Target, read_arguments
from mayfly_worker.text.dialects.dialect import (
    HEADER,
    NORMAL,
    REASONING,
    ROUTED,
    TOOL,
    Dialect,
    Framing,
    Guide,
    Routed,
)
from mayfly_worker.text.json_pieces import Reading, Source

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"

OTHER = "other"
"""State of an answer within a message of another role than the assistant's, which is left out."""

_FUNCTIONS = "functions."
_LONGEST = 200
"""Largest length, in characters, of a recipient before any marker; names of tools have 128."""
_OTHERS = ("user", "system", "developer", "tool")
_NOBODY = ("", "all", "assistant", "user")
"""Recipients that are no tools."""

_TO = r"(?:\s*to=([^\s<]*))?"
_CHANNEL = r"(?:\s*<\|channel\|>\s*(\w*)|(analysis|commentary|final)\b)*"
_HEADER = re.compile(
    rf"\s*(?:<\|start\|>\s*(assistant|[\w.-]*)|assistant)?{_TO}{_CHANNEL}{_TO}"
    r"(?:\s*<\|constrain\|>\s*\w*|\s+(?:json|code)\b)?\s*"
)
_MARKER = re.compile("|".join(map(re.escape, (START, CHANNEL, CONSTRAIN))))
_LEADS = ("assistant", "to=", "analysis", "commentary", "final")


def route(header: str, *, cut: bool = False) -> Routed:
    """Reads the header of a message: the state of the message's text, and the tool it calls. With
    ``cut`` the answer was cut off within the header."""
    found = _HEADER.match(header)
    assert found is not None, "every part of a header may be missing"
    role, before, channel, bare, behind = (part or "" for part in found.groups())
    recipient = before or behind
    if role in _OTHERS or (recipient == "assistant" != role):
        return Routed(OTHER)
    recipient = "" if recipient in _NOBODY else recipient
    rest = _MARKER.sub("", header[found.end() :])
    if "<|" not in header:
        rest = "" if cut else header
    elif cut and any(word.startswith(rest) for word in (*_LEADS, "json", "code")):
        rest = ""
    elif recipient:
        rest = f"to={recipient} {rest}"
    state = REASONING if (channel or bare) == "analysis" else NORMAL
    return Routed(state, recipient, tool_of(recipient), rest)


def may_be_header(text: str) -> bool:
    """True if a text where a header is expected may become one."""
    if "<|" in text:
        return True
    lead = text.lstrip().removeprefix("assistant").lstrip()
    if lead.startswith("to="):
        return len(lead) < _LONGEST
    return any(word.startswith(lead) for word in _LEADS)


def tool_of(recipient: str) -> str:
    """Returns the name of the tool to which a message goes."""
    return recipient.removeprefix(_FUNCTIONS)


def parse_message(text: str, tools: Any = None) -> dict[str, Any]:
    """Parses ``to=functions.NAME {…}``. A call without any text has no arguments."""
    recipient, _, arguments = text.removeprefix("to=").partition(" ")
    return {
        "name": tool_of(recipient),
        "arguments": json.loads(arguments, strict=False) if arguments.strip() else {},
    }


def read_message(source: Source, target: Target) -> Reading[None]:
    """Reads a call as :func:`parse_message`."""
    recipient: list[str] = []
    yield from source.until(recipient.append, " ")
    yield from source.skip_space()
    name = tool_of("".join(recipient).removeprefix("to="))
    yield from read_arguments(source, target, name)


CALLS = Dialect(
    name="harmony",
    parse=parse_message,
    read=read_message,
    words=((CHANNEL, MESSAGE),),
    aliases=("gpt_oss", "openai"),
)

_LEAVING = [(marker, HEADER) for marker in (END, CALL, RETURN, START)]


def _text(state: str) -> list[tuple[str, str]]:
    """Returns the markers in the text of messages; those of headers are taken out of it."""
    return [*_LEAVING, (CHANNEL, HEADER), (CONSTRAIN, state), (MESSAGE, state)]


HARMONY = Framing(
    name="harmony",
    aliases=("gpt_oss", "openai_gptoss"),
    initial=HEADER,
    transitions={
        HEADER: [*_LEAVING, (MESSAGE, ROUTED)],
        NORMAL: _text(NORMAL),
        REASONING: _text(REASONING),
        OTHER: _text(OTHER),
        TOOL: [*_LEAVING, *((marker, HEADER) for marker in (CHANNEL, CONSTRAIN, MESSAGE))],
    },
    start=START,
    kept=(START, CHANNEL),
    ends=(CALL, RETURN),
    route=route,
    may_be_header=may_be_header,
    guide=Guide(
        calls=CALLS,
        thought=(f"{CHANNEL}analysis{MESSAGE}", f"{END}{START}assistant"),
        answer=(f"{CHANNEL}final{MESSAGE}", f"{CHANNEL}final {CONSTRAIN}json{MESSAGE}"),
        call=(
            f"{CHANNEL}commentary to=functions.{{}} {CONSTRAIN}json{MESSAGE}",
            f" to=functions.{{}}{CHANNEL}commentary {CONSTRAIN}json{MESSAGE}",
            f" to=functions.{{}}{CHANNEL}commentary json{MESSAGE}",
        ),
    ),
    efforts={"none": "low", "minimal": "low", "xhigh": "high", "max": "high"},
    words=CALLS.words,
)
