"""Puts the tools of a request into its prompt.

Most chat templates read tools, in one of several places (:func:`tools_place`). Where a template
reads them nowhere, a text at the beginning of the system message describes them, and says in which
form the model has to write calls (:func:`described`): as the template prints earlier calls, or else
in the form of the model's dialect. That text depends on the tools and the model alone, so that it
stays in the prefix cache from turn to turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

from mayfly_worker.text.arrangement import PROBED_TOOL, SYSTEM_ROLES, Message
from mayfly_worker.text.dialects.dialect import Dialect
from mayfly_worker.text.dialects.json_calls import DEEPSEEK

ToolsPlace = Literal["tools", "bare", "xml_tools", "system"]
"""Place in which a chat template reads tools: the variable ``tools``, with OpenAI's objects or with
the bare functions in them; SmolLM3's variable ``xml_tools``; or, as JSON text, the field ``tools``
of the system message, as Phi-4-mini's template does."""

EXAMPLE: Message = {"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}
"""The call that shows the form of calls to the model."""


@lru_cache(maxsize=8)
def tools_place(tokenizer: Any) -> ToolsPlace | None:
    """Finds the place in which the tokenizer's chat template reads tools, by rendering a small
    conversation; None if it reads them nowhere. A template that refuses the variable ``tools`` gets
    it in requests, and answers itself: it may have refused the tool that it was tried with."""
    function = PROBED_TOOL["function"]
    question = [{"role": "user", "content": "?"}]
    refused = False
    for place in get_args(ToolsPlace):
        try:
            text = tokenizer.apply_chat_template(
                in_system_message(question, [PROBED_TOOL], place),
                tokenize=False,
                **variables([PROBED_TOOL], place),
            )
        except Exception:
            # Templates are programs, which refuse tools, or an empty system message, by anything.
            refused = refused or place == "tools"
            continue
        if function["name"] in text and function["description"] in text:
            return place  # type: ignore[no-any-return]
    return "tools" if refused else None


def describes_tools(tokenizer: Any) -> bool:
    """True if prompts describe the tools of a request because the model's chat template reads
    none."""
    return bool(tokenizer.has_chat_template) and tools_place(tokenizer) is None


def variables(tools: Sequence[Message], place: ToolsPlace | None) -> dict[str, Any]:
    """Returns the variables by which a chat template that reads tools in ``place`` gets them. One
    that reads them nowhere gets them, too: transformers chooses one of several templates so."""
    if not tools or place == "system":
        return {}
    if place == "bare":
        return {"tools": [tool["function"] for tool in tools]}
    return {place or "tools": tools}


def in_system_message(
    messages: Sequence[Message], tools: Sequence[Message], place: ToolsPlace | None
) -> list[Message]:
    """Returns a conversation with the tools in its system message, if the chat template reads them
    there."""
    if not tools or place != "system":
        return list(messages)
    functions = _json([tool["function"] for tool in tools])
    if not messages or messages[0].get("role") != "system":
        messages = [{"role": "system", "content": ""}, *messages]
    return [{**messages[0], "tools": functions}, *messages[1:]]


# For templates that read no tools


def described(messages: Sequence[Message], tools: Sequence[Message], form: str) -> list[Message]:
    """Returns a conversation whose system message begins with a description of the tools. ``form``
    is the text of the call EXAMPLE, as the model has to write it; empty if it is not known."""
    parts = [
        "# Tools\n\nYou can call these tools, each of which is described as JSON:",
        "\n".join(_json(tool["function"]) for tool in tools),
    ]
    if form:
        parts += [
            "A call of the tool NAME, with VALUE for its parameter PARAMETER, is written so:",
            form,
            "Write nothing after your calls: their results come in the next message.",
        ]
    parts.append("Call a tool only if it is needed to answer.")
    text = "\n\n".join(parts)
    if messages and messages[0].get("role") in SYSTEM_ROLES:
        first = messages[0]
        joined = "\n\n".join(filter(None, (text, first["content"])))
        return [{**first, "content": joined}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def written(calls: Sequence[Mapping[str, Any]], dialect: Dialect | None) -> str:
    """Returns the text of calls, which have a ``name`` and ``arguments``: in the form of the
    ``dialect``, or without one as the grammar of enforced calls has them."""
    made = [{"name": call["name"], "arguments": call.get("arguments") or {}} for call in calls]
    if dialect is None:
        return json.dumps(made, ensure_ascii=False, separators=(",", ":"))
    start, end = next(iter(dialect.starts), ""), next(iter(dialect.ends), "")
    if dialect.name == "json_tools":
        return "\n".join(f"{start}\n{_json(each)}\n{end}" for each in made)
    if dialect.name == "pythonic":
        return f"{start}[{', '.join(map(_pythonic, made))}]{end}"
    if dialect.name == "deepseek_v3":
        return f"{start}{chr(10).join(map(_fenced, made))}{end}"
    return f"{start}{_json(made)}{end}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _pythonic(call: Message) -> str:
    arguments = (
        f"{key}={_json(value) if isinstance(value, str) else repr(value)}"
        for key, value in call["arguments"].items()
    )
    return f"{call['name']}({', '.join(arguments)})"


def _fenced(call: Message) -> str:
    """Returns a call as DeepSeek's R1 writes it."""
    arguments = f"```json\n{_json(call['arguments'])}\n```"
    return f"{DEEPSEEK.begin}function{DEEPSEEK.separator}{call['name']}\n{arguments}{DEEPSEEK.end}"


def example_in(text: str, dialect: Dialect | None) -> str:
    """Returns the part of a text that is the call EXAMPLE in the form of the ``dialect``, with its
    markers; an empty text if the dialect's parser finds no such call."""
    if dialect is None:
        return text if text == written([EXAMPLE], None) else ""
    starts = [at for marker in dialect.starts if (at := text.find(marker)) >= 0]
    if not starts:
        return ""
    begin = min(starts)
    start = max((m for m in dialect.starts if text.startswith(m, begin)), key=len)
    ends = [(at, marker) for marker in dialect.ends if (at := text.rfind(marker)) > begin]
    if not ends:
        return ""
    at, marker = max(ends)
    try:
        found = dialect.parse(text[begin + len(start) : at], [])
    except Exception:
        return ""  # parsers raise anything on text that they cannot read
    [call] = found if isinstance(found, list) and len(found) == 1 else [found]
    if not isinstance(call, dict) or any(call.get(key) != EXAMPLE[key] for key in EXAMPLE):
        return ""
    return text[begin : at + len(marker)]
