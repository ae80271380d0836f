"""Writes the constraints on a request's output as llguidance grammars.

A grammar is a list of parts, of which the first is the start; ``@name`` in a part refers to another
part. JSON is compact, without whitespace between its tokens: a weak model that may write whitespace
can go on writing whitespace for ever.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from mayfly_protocol.requests import ChatPrompt, Constraint
from mayfly_worker.request_errors import InvalidInput
from mayfly_worker.text.dialects.dialect import HEADER, NORMAL, REASONING, Guide

MAX_CHARACTERS = 250_000
MAX_PROPERTIES = 2_000
"""Largest number of properties of one object in a JSON schema: llguidance's time grows with the
square of their number (0.6 s for 2,000)."""
MAX_CALLS = 16
"""Largest number of tool calls in one answer if the request forces tool calls."""

_OPENING = {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """The parts of a grammar, before it is compiled. ``schemas`` are the JSON schemas among the
    parts, in which the place of an error is searched for, each after a description of its place in
    the request. ``param`` is the request's field that an error names."""

    parts: tuple[dict[str, Any], ...]
    param: str
    schemas: tuple[tuple[str, Schema], ...] = ()

    def text(self) -> str:
        return json.dumps({"grammars": self.parts})

    def after(self, thought: str) -> GrammarSource:
        """Returns a grammar for a text (the model's reasoning), which the Lark rule ``thought``
        describes, followed by output of this grammar."""
        first = {"name": "answered", "lark_grammar": f"start: thought @answer\n{thought}"}
        renamed = {**self.parts[0], "name": "answer"}
        return GrammarSource((first, renamed, *self.parts[1:]), self.param, self.schemas)


def constraint_grammar(constraint: Constraint) -> GrammarSource:
    """Returns the grammar of a constraint on a request's output. Raises InvalidInput if the
    constraint's value is too long, or cannot be read as its kind demands (a JSON schema, for
    example, has to be a JSON object)."""
    if len(constraint.value) > MAX_CHARACTERS:
        raise InvalidInput(
            f"the {constraint.kind} has {len(constraint.value)} characters, "
            f"and at most {MAX_CHARACTERS} are read",
            constraint.param,
        )
    return _WRITERS[constraint.kind](constraint.value, constraint.param)


def tool_call_grammar(
    prompt: ChatPrompt, headers: Callable[[str], str] | None = None
) -> GrammarSource:
    """Returns the grammar of ``[{"name":…,"arguments":{…}},…]`` with tools of the prompt: one call
    or, if the request allows parallel calls, up to 16 (``MAX_CALLS``); if the request forces one
    tool, one call of that tool. With ``headers``, which returns the Lark text that a call of the
    tool of a name begins with, it is that of one call, its arguments alone after the header.

    Raises:
        InvalidInput: there is no tool to call, or a tool's parameters are no schema of an object.
    """
    tools = [tool["function"] for tool in prompt.tools]
    if prompt.forced_tool is not None:
        tools = [tool for tool in tools if tool["name"] == prompt.forced_tool]
    if not tools:
        raise InvalidInput("tool_choice forces a call of a tool that is not there", "tool_choice")
    one = prompt.forced_tool is not None or not prompt.parallel_tool_calls
    several = '"[" call "]"' if one else f'"[" call ("," call){{0,{MAX_CALLS - 1}}} "]"'
    rules = [
        f"start: {'call' if headers else several}",
        "call: " + " | ".join(f"call_{n}" for n in range(len(tools))),
    ]
    parts, schemas = [], []
    for n, tool in enumerate(tools):
        opening = f'{{"name":{json.dumps(tool["name"])},"arguments":'
        if headers is None:
            rules.append(f'call_{n}: {json.dumps(opening)} @arguments_{n} "}}"')
        else:
            rules.append(f"call_{n}: {headers(tool['name'])} @arguments_{n}")
        schema = _parameters(tool)
        parts.append({"name": f"arguments_{n}", "json_schema": compact(schema)})
        schemas.append((f"the parameters of tool {tool['name']!r}", schema))
    calls = {"name": "calls", "lark_grammar": "\n".join(rules)}
    return GrammarSource((calls, *parts), "tools", tuple(schemas))


def thought_rule(ends: Sequence[str], special: Mapping[str, Sequence[int]]) -> str:
    """Returns the Lark rule ``thought``: the rest of reasoning that has begun, up to one of its end
    marks ``ends``.

    The model may write an end mark as its tokens, or spell it with other tokens. llguidance lets no
    text match special tokens, so the marks that have some are ``special``, with their ids.
    """
    marker = f"({'|'.join(regex_to_lark(_quoted(end), '') for end in ends)})"
    by_ids = [f"TEXT{''.join(f' <[{id}]>' for id in ids)}" for ids in special.values()]
    return (
        f"thought: {' | '.join([*by_ids, 'spelled'])}\n"
        f"spelled[lazy]: /(?s:.*){marker}/\n"
        f"TEXT: /(?s:.*)/ & ~/(?s:.*{marker}.*)/\n"
    )


def call_headers(guide: Guide, lark: Callable[[str], str], name: str) -> str:
    """Returns the headers that a call of the tool ``name`` may have, as a part of a Lark rule;
    ``lark`` writes a text with special tokens as such a part."""
    return f"({' | '.join(lark(header.format(name)) for header in guide.call)})"


def message_rule(guide: Guide, lark: Callable[[str], str], *, state: str, call: bool) -> str:
    """Returns the Lark rule ``thought`` of what comes before an answer, or before a ``call``, in a
    model's own framing: the thought and, of an answer, the header. ``state`` is that in which the
    prompt ends: HEADER, REASONING or, before a call only, NORMAL."""
    begin, end = map(lark, guide.thought)
    before = {HEADER: f"({begin} TEXT {end})?", REASONING: f"TEXT {end}", NORMAL: end}[state]
    header = "" if call else f" ({' | '.join(map(lark, guide.answer))})"
    marker = regex_to_lark(_quoted(guide.thought[1]), "")
    return f"thought: {before}{header}\nTEXT: /(?s:.*)/ & ~/(?s:.*{marker}.*)/\n"


def _quoted(text: str) -> str:
    """Returns a regular expression that matches this text alone."""
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def compact(schema: Schema) -> Schema:
    """Restricts a JSON schema to documents without whitespace between their tokens."""
    return {**schema, "x-guidance": {"whitespace_flexible": False}}


def _object(value: str, param: str) -> GrammarSource:
    schema = _read_schema(value, param) if value else {}
    return _schema(json.dumps({"type": "object", **schema}), param)


def _schema(value: str, param: str) -> GrammarSource:
    schema = _read_schema(value, param)
    part = {"name": "schema", "json_schema": compact(schema)}
    return GrammarSource((part,), param, (("the schema", schema),))


def _read_schema(value: str, param: str) -> Schema:
    try:
        schema = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"the schema is not JSON: {error}", param) from error
    if not isinstance(schema, dict):
        raise InvalidInput("the schema has to be a JSON object", param)
    _check_size(schema, param)
    return schema


def _check_size(schema: Schema, param: str) -> None:
    nodes: list[Any] = [schema]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            if len(node) > MAX_PROPERTIES:
                raise InvalidInput(
                    f"the schema has an object of {len(node)} properties, "
                    f"and at most {MAX_PROPERTIES} are followed",
                    param,
                )
            nodes += node.values()
        elif isinstance(node, list):
            nodes += node


def _parameters(tool: dict[str, Any]) -> Schema:
    """Returns a tool's parameters as a JSON schema of an object, without properties if the tool
    declares no parameters.

    Undeclared parameters are forbidden unless the schema mentions them: no tool expects them, and a
    weak model would invent them for ever.
    """
    schema = tool.get("parameters") or {"properties": {}}
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise InvalidInput(
            f"the parameters of tool {tool['name']!r} have to be a schema of type object", "tools"
        )
    _check_size(schema, "tools")
    closed = {} if _OPENING & schema.keys() else {"additionalProperties": False}
    return {**schema, **closed, "type": "object"}


def _regex(value: str, param: str) -> GrammarSource:
    part = {"name": "regex", "lark_grammar": f"start: /{regex_to_lark(value, 'd')}/"}
    return GrammarSource((part,), param)


def _choice(value: str, param: str) -> GrammarSource:
    try:
        choices = json.loads(value)
    except ValueError as error:
        raise InvalidInput(f"the choices are not JSON: {error}", param) from error
    if not isinstance(choices, list) or not all(isinstance(c, str) for c in choices) or not choices:
        raise InvalidInput("the choices have to be a list of strings", param)
    alternatives = " | ".join(json.dumps(choice) for choice in choices)
    return GrammarSource(({"name": "choice", "lark_grammar": f"start: {alternatives}"},), param)


def _grammar(value: str, param: str) -> GrammarSource:
    try:
        lark = any_to_lark(value)
    except Exception as error:
        # The translator is a plain parser; malformed text makes it raise any kind of exception.
        raise InvalidInput(f"the grammar is neither Lark nor GBNF: {error}", param) from error
    return GrammarSource(({"name": "grammar", "lark_grammar": lark},), param)


_WRITERS = {
    "json_object": _object,
    "json_schema": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
