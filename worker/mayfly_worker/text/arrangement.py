"""Rearranges conversations that a model's chat template would refuse, or print only in part.

Templates differ in what they do with a system message that is not the one and only first message:
print it where it stands, hoist it to the front, drop it without a word, or raise. Others know no
system role at all, or demand that user and assistant alternate, or ids of a certain length. Small
conversations, rendered once for each template, show what it does (:func:`probe`); :func:`arrange`
then rewrites a conversation so that all its texts get into the prompt. On the left, messages that a
template may not take; on the right, what they become:

====================================  ==================================================
several system messages at the start  one, with all texts
the system message at the start       the beginning of the first user message
a system message further on           a user message in the same place, since a prompt
                                      that changed at its front would miss the prefix cache
user messages in a row                one, with all texts
texts of the assistant's in a row     one, with all texts
a user message after a tool's result  the end of that result
the result of a tool                  a user message, in ``<tool_response>``
a text beside tool calls              a message before the calls
several tool calls in one message     a message for each, with its result behind it
the id of a tool call                 nine letters and digits
====================================  ==================================================

Each line applies only to templates that need it. The choice depends on the template alone, never on
the rest of a conversation, so that the prompt of a conversation's next turn begins like that of the
turn before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]

SYSTEM_ROLES = ("system", "developer")

_ABOVE, _BELOW, _ASKED, _SAID, _AGAIN, _RESULT = (f"kiwi-{n}" for n in range(6))
PROBED_TOOL: Message = {
    "type": "function",
    "function": {
        "name": "weigh",
        "description": "Weighs.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "What."}},
            "required": ["x"],
        },
    },
}
_SHORT_ID, _LONG_ID = "abcdefgh1", "call_0123456789abcdef01234567"
"""Ids of the tool calls in the conversations that test a chat template: one of nine letters and
digits, as the templates of some models demand, and one as this server makes them."""


@dataclass(frozen=True, slots=True)
class TemplateAbilities:
    """Abilities of a chat template: True for each kind of conversation that the template prints
    with all its texts."""

    developer: bool = True
    """Prints a developer message at the start of a conversation."""
    leading: bool = True
    """Prints a system message at the start of a conversation."""
    several: bool = True
    """Prints two system messages at the start of a conversation."""
    later: bool = True
    """Prints system messages that come after other messages, in their places."""
    users_in_a_row: bool = True
    texts_in_a_row: bool = True
    """Prints two messages of the assistant's, one after the other."""
    user_after_tool: bool = True
    results: bool = True
    """Prints the results of tools."""
    text_beside_calls: bool = True
    """Prints the text of a message with tool calls, or cannot print the text in a message before
    it."""
    several_calls: bool = True
    """Prints several tool calls in one message."""
    any_call_id: bool = True
    """Prints tool calls whose ids are not nine letters and digits."""


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def probe(render: Callable[[list[Message]], str]) -> TemplateAbilities:
    """Finds a chat template's abilities by rendering small conversations; ``render`` renders a
    conversation with the template."""

    def prints(*messages: Message, ordered: bool = True) -> bool:
        try:
            text = render(list(messages))
        except Exception:
            return False  # templates are programs, which refuse a conversation by any exception
        places = [text.find(str(message["content"])) for message in messages if message["content"]]
        return -1 not in places and (not ordered or places == sorted(places))

    user, again = _message("user", _ASKED), _message("user", _AGAIN)
    assistant = _message("assistant", _SAID)
    first, second = _message("system", _ABOVE), _message("system", _BELOW)
    call = {"name": "weigh", "arguments": {"x": "1"}}

    def calling(id: str) -> list[Message]:
        made = {"id": id, "type": "function", "function": call}
        return [
            user,
            {"role": "assistant", "content": "", "tool_calls": [made]},
            {"role": "tool", "tool_call_id": id, "name": "weigh", "content": _RESULT},
        ]

    def prints_both() -> bool:
        """True if the template prints two calls in one message, or does not print arguments."""
        first, second = ({"x": "kiwi-8"}, {"x": "kiwi-9"})
        calls = [
            {"id": id, "type": "function", "function": {"name": "weigh", "arguments": arguments}}
            for id, arguments in ((_SHORT_ID, first), (_SHORT_ID[::-1], second))
        ]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "name": "weigh", "content": content}
            for call, content in zip(calls, (_RESULT, _AGAIN), strict=True)
        ]
        try:
            text = render([user, {**called[1], "tool_calls": calls}, *results])
        except Exception:
            return False
        return "kiwi-8" not in text or "kiwi-9" in text

    called = calling(_SHORT_ID)
    calls = prints(*called)
    return TemplateAbilities(
        developer=prints(_message("developer", _ABOVE), user, ordered=False),
        # Some templates print the system's text beside a question that comes last, or not at all.
        leading=prints(first, user, ordered=False)
        and (not prints(user, assistant) or prints(first, user, assistant, ordered=False))
        and (not calls or prints(first, *called, ordered=False)),
        several=prints(first, second, user, ordered=False),
        later=prints(user, second)
        and prints(user, second, assistant, again)
        and prints(user, assistant, second, again)
        and (not calls or prints(*called, second)),
        users_in_a_row=prints(user, again),
        texts_in_a_row=not prints(user, assistant, again)
        or prints(user, assistant, _message("assistant", _BELOW), again),
        user_after_tool=not calls or prints(*called, again),
        results=calls or not prints(user),
        text_beside_calls=not calls
        or prints(user, {**called[1], "content": _SAID}, called[2], ordered=False)
        or not prints(user, assistant, *called[1:], _message("assistant", _BELOW), again),
        several_calls=not calls or prints_both(),
        any_call_id=not calls or prints(*calling(_LONG_ID)),
    )


def leading_system(messages: Sequence[Mapping[str, Any]]) -> int:
    """Returns the number of system and developer messages at the start of a conversation."""
    return sum(1 for _ in takewhile(lambda m: m.get("role") in SYSTEM_ROLES, messages))


def arrange(messages: Sequence[Message], can: TemplateAbilities) -> list[Message]:
    """Rewrites a conversation, so that a template with the abilities ``can`` prints all its texts.
    The content of each message has to be a text."""
    if not can.text_beside_calls:
        messages = [each for message in messages for each in _text_and_calls(message)]
    if not can.several_calls:
        messages = _with_single_calls(messages)
    start = leading_system(messages)
    arranged = list(messages[:start])
    if start > 1 and not (can.several and can.leading):
        arranged = [_joined(arranged)]
    folded = bool(arranged) and not can.leading
    if folded:
        arranged = [{"role": "user", "content": arranged[0]["content"]}]
    for message in messages[start:]:
        if message.get("role") in SYSTEM_ROLES and not can.later:
            if not message["content"]:
                continue
            message = {"role": "user", "content": message["content"]}
        if message.get("role") == "tool" and not can.results:
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            message = {"role": "user", "content": result}
        last = arranged[-1] if arranged else {}
        if message.get("role") == "user":
            joins = (last.get("role") == "user" and (folded or not can.users_in_a_row)) or (
                last.get("role") == "tool" and not can.user_after_tool
            )
        else:
            joins = not can.texts_in_a_row and _is_text(message) and _is_text(last)
        if joins:
            arranged[-1] = _joined([arranged[-1], message])
        else:
            arranged.append(message)
        folded = False
    return arranged if can.any_call_id else [_with_short_ids(message) for message in arranged]


def _text_and_calls(message: Message) -> list[Message]:
    """Returns a message with both a text and tool calls as two messages; another as it is."""
    if not message.get("tool_calls") or not message["content"].strip():
        return [message]
    text = {key: value for key, value in message.items() if key != "tool_calls"}
    return [text, {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}]


def _with_single_calls(messages: Sequence[Message]) -> list[Message]:
    """Returns a conversation with a message for each tool call, and the call's result behind it.
    The text of a message with several calls stays with the first of them."""
    single: list[Message] = []
    placed: set[int] = set()
    for at, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            if at not in placed:
                single.append(message)
            continue
        behind = range(at + 1, len(messages))
        results = {
            messages[n].get("tool_call_id"): n
            for n in takewhile(lambda n: messages[n].get("role") == "tool", behind)
        }
        for number, call in enumerate(calls):
            first = message if number == 0 else {"role": "assistant", "content": ""}
            single.append({**first, "tool_calls": [call]})
            if (result := results.pop(call.get("id"), None)) is not None:
                single.append(messages[result])
                placed.add(result)
    return single


def _is_text(message: Mapping[str, Any]) -> bool:
    """True for an assistant's message without calls. Beside calls, templates of the kind that has
    roles alternate print no text."""
    return message.get("role") == "assistant" and not message.get("tool_calls")


def _joined(messages: Sequence[Message]) -> Message:
    """Returns the first of ``messages`` with the texts of all of them as its content, an empty line
    between each two."""
    texts = [message["content"] for message in messages if message["content"]]
    return {**messages[0], "content": "\n\n".join(texts)}


def _with_short_ids(message: Message) -> Message:
    changed = dict(message)
    if message.get("tool_call_id"):
        changed["tool_call_id"] = _short(message["tool_call_id"])
    if message.get("tool_calls"):
        changed["tool_calls"] = [
            {**call, "id": _short(call["id"])} if call.get("id") else call
            for call in message["tool_calls"]
        ]
    return changed


def _short(id: str) -> str:
    if len(id) == len(_SHORT_ID) and id.isascii() and id.isalnum():
        return id
    return hashlib.blake2b(id.encode()).hexdigest()[: len(_SHORT_ID)]
