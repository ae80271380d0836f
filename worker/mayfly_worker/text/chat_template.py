"""Renders conversations as text by a model's chat template, and finds out what the template can do.

A prompt has to render identically on every worker that runs its request. Templates ask for the date
with ``strftime_now(format)``, which transformers answers from the clock and does not let a caller
replace; a macro of that name in front of the template answers with the request's own date.

A request may set the variables that the template names (``chat_template_kwargs``). Those that ask
for thoughts or for none, which many clients send to every model, are left out where the template
has none of the name.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from functools import lru_cache, partial
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.sandbox import SandboxedEnvironment
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from mayfly_protocol.requests import ChatPrompt
from mayfly_worker.request_errors import InvalidInput
from mayfly_worker.text.arrangement import PROBED_TOOL, TemplateAbilities, probe
from mayfly_worker.text.control_tokens import break_control_tokens, control_tokens
from mayfly_worker.text.detokenize import hugging_face
from mayfly_worker.text.dialects.registry import output_format
from mayfly_worker.text.earlier_answers import AnswerForms, probe_answers, restore
from mayfly_worker.text.markers import marker_ids
from mayfly_worker.text.tool_prompt import described, in_system_message, tools_place, variables

DATE_VARIABLE = "mayfly_date"

_MACRO = (
    "{%- macro strftime_now(format) -%}"
    "{%- set text = namespace(value=format) -%}"
    "{%- for directive, meaning in " + DATE_VARIABLE + ".items() -%}"
    "{%- set text.value = text.value.replace(directive, meaning) -%}"
    "{%- endfor -%}"
    "{{- text.value -}}"
    "{%- endmacro -%}"
    # Keeps the macro's end tag from trimming whitespace at the template's beginning.
    "{{ '' }}"
)

_DIRECTIVES = (
    *("%-d", "%-m", "%-j", "%-H", "%-I", "%-M", "%-S"),  # glibc's, without padding
    *("%a", "%A", "%b", "%B", "%c", "%d", "%D", "%e", "%F", "%G", "%h", "%H", "%I", "%j"),
    *("%m", "%M", "%p", "%S", "%T", "%u", "%U", "%V", "%w", "%x", "%X", "%y", "%Y"),
)


def with_strftime_macro(template: str) -> str:
    """Puts a macro ``strftime_now``, which reads the date from the template variable
    :data:`DATE_VARIABLE`, in front of a chat template."""
    return _MACRO + template


def date_directives(day: date) -> dict[str, str]:
    """Returns the text of each directive of a date format (such as ``%Y``) for a day, at
    midnight."""
    return {directive: day.strftime(directive) for directive in _DIRECTIVES}


RESERVED_KWARGS = frozenset(
    {
        DATE_VARIABLE,
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "strftime_now",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Names that a request cannot use for template variables of its own: the server sets these
variables, or the names are arguments of transformers."""

THOUGHT_HINTS = frozenset(
    {
        "clear_thinking",
        "enable_thinking",
        "preserve_thinking",
        "reasoning_effort",
        "thinking",
        "thinking_budget",
    }
)
"""Variables by which clients ask any model for thoughts, or for none; also fields of requests
become these."""

_QUESTION = {"role": "user", "content": "?"}

_SWITCHES = ("enable_thinking", "thinking")
"""Names of the variable that turns thoughts on and off, of which a template has one."""
_SPECIAL_TOKENS = frozenset(
    f"{name}_token" for name in ("bos", "cls", "eos", "mask", "pad", "sep", "unk")
)


class ChatTemplate:
    """A model's chat template, with all variables that one request sets except for the messages."""

    def __init__(self, prompt: ChatPrompt, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._control = control_tokens(tokenizer)
        source = _source(tokenizer, bool(prompt.tools))
        self._names_developer = source is None or "developer" in source
        self.tools = [break_control_tokens(tool, self._control) for tool in prompt.tools]
        self._place = tools_place(tokenizer) if self.tools else None
        self._generation = prompt.add_generation_prompt and not prompt.continue_final_message
        self._continue = prompt.continue_final_message
        self._kwargs = break_control_tokens(prompt.template_kwargs, self._control)
        self._kwargs |= variables(self.tools, self._place)
        if source is not None and "strftime_now" in source:
            day = date.fromisoformat(prompt.date) if prompt.date else date.today()
            source = with_strftime_macro(source)
            self._kwargs |= {"chat_template": source, DATE_VARIABLE: date_directives(day)}
        if source is not None:
            _let_change_lists(source)

    def message(self, message: Mapping[str, Any], can: TemplateAbilities) -> dict[str, Any]:
        """Returns a message as the chat template, with the abilities ``can``, expects it: with an
        empty content if the message has none, and with the role ``system`` in place of
        ``developer`` if the template does not know that role."""
        known = {**message, "content": message.get("content") or ""}
        if known.get("role") == "developer" and not (self._names_developer and can.developer):
            known["role"] = "system"
        return known

    def completed(
        self, messages: Sequence[dict[str, Any]], forms: AnswerForms
    ) -> list[dict[str, Any]]:
        """Returns a conversation that forges no control tokens, but for those in the model's own
        answers, if its answers hold them, and that has a description of the tools if the template
        reads none. ``forms`` are those of the conversation's answers."""
        trusted = marker_ids(self._tokenizer) is None
        safe = [
            message
            if message.get("role") == "assistant" and trusted
            else break_control_tokens(message, self._control)
            for message in messages
        ]
        if self.tools and self._place is None:
            return described(safe, self.tools, forms.example)
        return safe

    def text(self, messages: Sequence[dict[str, Any]], *, whole: bool = True) -> str:
        """Renders the conversation as text. Only with ``whole`` does the text end as the request
        wants it: by asking for an answer, or by leaving the last message open."""
        given = in_system_message(messages, self.tools, self._place)
        return self._tokenizer.apply_chat_template(  # type: ignore[no-any-return]
            given,
            tokenize=False,
            add_generation_prompt=whole and self._generation,
            continue_final_message=whole and self._continue,
            **self._kwargs,
        )


@lru_cache(maxsize=8)
def _let_change_lists(source: str) -> None:
    """Lets a chat template change lists, as that of Kimi K2 does (``ids.append(id)``). transformers
    forbids it, although the lists are the template's own or copies."""
    environment = _compile_jinja_template(source).environment
    environment.is_safe_attribute = partial(SandboxedEnvironment.is_safe_attribute, environment)


@lru_cache(maxsize=8)
def abilities_of(tokenizer: Any, tools: bool) -> TemplateAbilities:
    """Finds the kinds of conversations that the tokenizer's chat template prints in full, by
    rendering small conversations, which declare a tool if ``tools``."""
    template = ChatTemplate(ChatPrompt((), tools=(PROBED_TOOL,) if tools else ()), tokenizer)
    every = TemplateAbilities()
    forms = answer_forms(tokenizer, tools, ())

    def printed(messages: list[dict[str, Any]]) -> str:
        given = [template.message(message, every) for message in messages]
        return template.text(restore(given, forms))

    return probe(printed)


@lru_cache(maxsize=64)
def answer_forms(
    tokenizer: Any, tools: bool, switches: tuple[tuple[str, bool], ...]
) -> AnswerForms:
    """Finds the forms of earlier answers that the tokenizer's chat template takes, by rendering
    small conversations, which declare a tool if ``tools`` and set the variables ``switches``."""
    prompt = ChatPrompt((), (PROBED_TOOL,) if tools else (), template_kwargs=dict(switches))
    template = ChatTemplate(prompt, tokenizer)
    output = output_format(tokenizer)
    opened = _opened_with(template, output.thought.start) if output.thought else ""
    render = partial(template.text, whole=False)
    name = PROBED_TOOL["function"]["name"]
    describes = tools and tools_place(tokenizer) is None
    return probe_answers(render, name, output, opened, described=describes)


def _opened_with(template: ChatTemplate, start: str) -> str:
    """Returns the whitespace with which prompts end behind the start marker of reasoning."""
    try:
        text = template.text([_QUESTION])
    except Exception:
        return ""  # a template may refuse this conversation
    rest = text.rpartition(start)[2]
    return rest if rest.isspace() else ""


def tools_in_full(tools: Sequence[dict[str, Any]], tokenizer: Any) -> tuple[dict[str, Any], ...]:
    """Returns tools as the tokenizer's chat template takes them: with an empty description, and a
    list of no parameters, where they have none, if the template refuses a tool with a name
    alone."""
    if not tools or _takes_bare_tools(tokenizer):
        return tuple(tools)
    return tuple({**tool, "function": _in_full(tool["function"])} for tool in tools)


def _in_full(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = dict(function.get("parameters") or {})
    for key, value in (("type", "object"), ("properties", {})):
        parameters.setdefault(key, value)
    full = {**function, "parameters": parameters}
    full.setdefault("description", "")
    return full


@lru_cache(maxsize=8)
def _takes_bare_tools(tokenizer: Any) -> bool:
    bare = {"type": "function", "function": {"name": PROBED_TOOL["function"]["name"]}}
    try:
        ChatTemplate(ChatPrompt((), tools=(bare,)), tokenizer).text([_QUESTION])
    except Exception:
        return False  # templates are programs, which refuse a conversation by any exception
    return True


def switches_of(kwargs: Mapping[str, Any]) -> tuple[tuple[str, bool], ...]:
    """Returns the template variables of a request that are true or false: they may decide what a
    template prints of thoughts, and are few."""
    return tuple(sorted((name, set) for name, set in kwargs.items() if isinstance(set, bool)))


def _source(tokenizer: Any, tools: bool) -> str | None:
    """Returns the text of the chat template; None if a function renders the model's chats
    instead."""
    inner = hugging_face(tokenizer)
    if tokenizer._chat_template is not None or inner.chat_template is None:
        return None
    return inner.get_chat_template(tools=[{}] if tools else None)  # type: ignore[no-any-return]


# Variables


def template_variables(tokenizer: Any) -> tuple[str, ...]:
    """Returns the names of the variables that a model's chat templates read and that a request may
    set, sorted."""
    if not tokenizer.has_chat_template:
        return ()
    return tuple(sorted(_names(tokenizer, tools=False) | _names(tokenizer, tools=True)))


def settable_variables(kwargs: Mapping[str, Any], tokenizer: Any, *, tools: bool) -> dict[str, Any]:
    """Returns the variables of a request that its chat template reads; ``tools`` says that the
    request has tools. Hints about thoughts that the template does not read are left out. Raises
    InvalidInput, with the names that could be set, for any other variable."""
    names = _names(tokenizer, tools=tools)
    if unknown := kwargs.keys() - names - THOUGHT_HINTS:
        name = min(unknown)
        kind = "sets itself" if name in RESERVED_KWARGS else "does not read"
        raise InvalidInput(
            f"chat_template_kwargs: {name if name.isidentifier() else '?'} is a variable that this "
            f"model's chat template {kind}; it reads {', '.join(sorted(names)) or 'none'}",
            "chat_template_kwargs",
        )
    known = {name: value for name, value in kwargs.items() if name in names}
    for name, other in (_SWITCHES, _SWITCHES[::-1]):
        asked = kwargs.get(other)
        if isinstance(asked, bool) and name in names and other not in names:
            known.setdefault(name, asked)
    efforts = output_format(tokenizer).framing.efforts
    effort = known.get("reasoning_effort")
    if isinstance(effort, str) and effort in efforts:
        known["reasoning_effort"] = efforts[effort]
    return known


def _names(tokenizer: Any, *, tools: bool) -> frozenset[str]:
    inner, renderer = hugging_face(tokenizer), tokenizer._chat_template
    names: set[str] = set()
    if renderer is not None:
        # mlx-lm's own renderers hand what they do not know to a function of their module.
        inside = getattr(sys.modules.get(renderer.__module__), "encode_messages", None)
        names = {"enable_thinking"} | _parameters(renderer) | (_parameters(inside) - {"context"})
    elif type(inner).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        names = _parameters(type(inner).apply_chat_template) - {"self"}
    try:
        source = _source(tokenizer, tools)
        names |= _names_in(source) if source is not None else frozenset()
    except (ValueError, TemplateError):
        pass  # a broken template, or none of this kind: rendering says so
    special = set(getattr(inner, "special_tokens_map", ()))
    return frozenset(names - RESERVED_KWARGS - _SPECIAL_TOKENS - special)


def _parameters(function: Any) -> set[str]:
    """Returns the names of a function's parameters; none for None."""
    if function is None:
        return set()
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}


@lru_cache(maxsize=8)
def _names_in(source: str) -> frozenset[str]:
    """Returns the names of the variables that a template reads from outside.

    A name to which the template assigns counts only if the template asks whether it is defined or
    gives it a default: jinja takes every variable that is assigned to in one branch and read in
    another for one from outside.
    """
    environment = _compile_jinja_template(source).environment
    tree = environment.parse(source)
    assigned: set[str] = set()
    asked: set[str] = set()
    for node in tree.find_all((nodes.Assign, nodes.AssignBlock, nodes.Test, nodes.Filter)):
        match node:
            case nodes.Test(name="defined" | "undefined", node=nodes.Name(name=name)):
                asked.add(name)
            case nodes.Filter(name="default" | "d", node=nodes.Name(name=name)):
                asked.add(name)
            case nodes.Assign(target=nodes.Name(name=name), node=nodes.Or() | nodes.CondExpr()):
                if any(read.name == name for read in node.node.find_all(nodes.Name)):
                    asked.add(name)
                assigned.add(name)
            case nodes.Assign(target=target) | nodes.AssignBlock(target=target):
                names = [target, *target.find_all(nodes.Name)]
                assigned |= {name.name for name in names if isinstance(name, nodes.Name)}
    outside = meta.find_undeclared_variables(tree) - environment.globals.keys()
    return frozenset(outside - (assigned - asked))
