"""System messages in places where a model's chat template takes none.

Templates differ in what they do with a system message that is not the one and only first message:
print it where it stands, hoist it to the front, drop it without a word, or raise. Others know no
system role at all, or demand that user and assistant alternate. Small conversations, rendered once
for each template, show what it does (:func:`probe`); :func:`arrange` then rewrites a conversation
so that all its texts get into the prompt. On the left, messages that a template may not take; on
the right, what they become:

====================================  ==================================================
several system messages at the start  one, with all texts
the system message at the start       the beginning of the first user message
a system message further on           a user message in the same place, since a prompt
                                      that changed at its front would miss the prefix cache
user messages in a row                one, with all texts
a user message after a tool's result  the end of that result
====================================  ==================================================

Each line applies only to templates that need it. The choice depends on the template alone, never on
the rest of a conversation, so that the prompt of a conversation's next turn begins like that of the
turn before.
"""

from __future__ import annotations

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
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    },
}
_CALL_ID = "abcdefgh1"
"""Id of the tool call in the conversations that test a chat template: nine letters and digits, as
the templates of some models demand."""


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
    user_after_tool: bool = True


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
    called: list[Message] = [
        user,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": _CALL_ID, "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": _CALL_ID, "name": "weigh", "content": _RESULT},
    ]
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
        user_after_tool=not calls or prints(*called, again),
    )


def leading_system(messages: Sequence[Mapping[str, Any]]) -> int:
    """Returns the number of system and developer messages at the start of a conversation."""
    return sum(1 for _ in takewhile(lambda m: m.get("role") in SYSTEM_ROLES, messages))


def arrange(messages: Sequence[Message], can: TemplateAbilities) -> list[Message]:
    """Rewrites a conversation, so that a template with the abilities ``can`` prints all its texts.
    The content of each message has to be a text."""
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
        last = arranged[-1].get("role") if arranged else None
        if message.get("role") == "user" and (
            (last == "user" and (folded or not can.users_in_a_row))
            or (last == "tool" and not can.user_after_tool)
        ):
            arranged[-1] = _joined([arranged[-1], message])
        else:
            arranged.append(message)
        folded = False
    return arranged


def _joined(messages: Sequence[Message]) -> Message:
    """Returns the first of ``messages`` with the texts of all of them as its content, an empty line
    between each two."""
    texts = [message["content"] for message in messages if message["content"]]
    return {**messages[0], "content": "\n\n".join(texts)}
