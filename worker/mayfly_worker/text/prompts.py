"""Renders a request's prompt as token ids.

Text from a request cannot forge the template's control tokens: where a message, a tool or a
template variable contains the text of a control token (``<|im_start|>``), the text is encoded as
several ordinary tokens. Assistant messages are the exception, since the model itself may have
written the markers in them. In raw prompts (completions) control tokens mean what they say.

A prompt has to render identically on every worker that runs its request. Templates ask for the date
with ``strftime_now(format)``, which transformers answers from the clock and does not let a caller
replace; a macro of that name in front of the template answers with the request's own date.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import lru_cache, partial
from itertools import takewhile
from typing import Any

from jinja2.sandbox import SandboxedEnvironment
from transformers.utils.chat_template_utils import _compile_jinja_template

from mayfly_protocol.requests import ChatPrompt, Prompt, TextPrompt
from mayfly_worker.request_errors import InvalidInput, PromptTooLong
from mayfly_worker.text.arrangement import (
    PROBED_TOOL,
    TemplateAbilities,
    arrange,
    leading_system,
    probe,
)
from mayfly_worker.text.detokenize import hugging_face
from mayfly_worker.text.dialects.registry import output_format
from mayfly_worker.text.earlier_answers import AnswerForms, probe_answers, restore
from mayfly_worker.text.markers import marker_strings

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


BREAK = "\U000f0000"
"""Private-use character that splits a prompt: no token of the encoded prompt reaches across it."""

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


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as token ids. The first ``system_tokens`` ids belong to the system prompt and the
    tools; other conversations with the same system prompt and tools begin with the same ids (0 if
    there is neither). ``in_reasoning`` says that the prompt ends inside reasoning, which the model
    goes on with."""

    ids: list[int]
    system_tokens: int = 0
    in_reasoning: bool = False


def render(prompt: Prompt, tokenizer: Any, width: int) -> RenderedPrompt:
    """Renders a prompt as token ids; ``tokenizer`` is mlx-lm's ``TokenizerWrapper``, ``width`` the
    number of ids that the model knows. Safe to call from several threads.

    Raises:
        InvalidInput: an empty prompt, an id that does not exist, a conversation that the chat
            template refuses (with the template's own words), or a conversation for a model that has
            no chat template.
    """
    param = param_of(prompt)
    if isinstance(prompt, ChatPrompt):
        rendered = _render_chat(prompt, tokenizer)
    elif isinstance(prompt, TextPrompt):
        rendered = RenderedPrompt(tokenizer.encode(prompt.text))
    else:
        rendered = RenderedPrompt(list(prompt.ids))
    if not rendered.ids:
        raise InvalidInput("the prompt is empty: there is no token to go on from", param)
    check_ids(rendered.ids, width, param)  # some tokenizers know more tokens than their model
    return rendered


def param_of(prompt: Prompt) -> str:
    """Returns the name of the request's field that holds the prompt."""
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"


def check_ids(ids: Collection[int], width: int, param: str) -> None:
    """Raises InvalidInput, naming the request's field ``param``, if a token id is outside ``[0,
    width)``: on a CPU such an id would end the process."""
    if ids and (min(ids) < 0 or max(ids) >= width):
        wrong = next(id for id in ids if not 0 <= id < width)
        raise InvalidInput(
            f"{param} has token id {wrong}, but this model's ids go from 0 to {width - 1}", param
        )


def token_budget(
    prompt_tokens: int, max_tokens: int | None, context: int, param: str = "prompt"
) -> int:
    """Returns the number of tokens that may be generated.

    The number is the room that the context leaves after the prompt, or ``max_tokens`` if that is
    less. A larger ``max_tokens`` is no error: the answer then ends where the context ends, with the
    finish reason ``length``.

    Raises:
        PromptTooLong: the prompt, in the request's field ``param``, leaves room for no token at all
            (or, with a ``max_tokens`` of 0, does not fit itself).
    """
    room = context - prompt_tokens
    if room < (0 if max_tokens == 0 else 1):
        raise PromptTooLong(prompt_tokens, context, param)
    return room if max_tokens is None else min(room, max_tokens)


# Chats


def _render_chat(prompt: ChatPrompt, tokenizer: Any) -> RenderedPrompt:
    if not tokenizer.has_chat_template:
        raise InvalidInput(
            "this model has no chat template; send a finished prompt to /v1/completions instead",
            "messages",
        )
    if reserved := RESERVED_KWARGS & prompt.template_kwargs.keys():
        raise InvalidInput(
            f"chat_template_kwargs cannot set {min(reserved)!r}", "chat_template_kwargs"
        )
    try:
        template = _Template(prompt, tokenizer)
        abilities = _abilities(tokenizer, bool(prompt.tools))
        given = restore(
            [template.message(message, abilities) for message in prompt.messages],
            _answer_forms(tokenizer, bool(prompt.tools), _switches(prompt.template_kwargs)),
        )
        text = template.text(arrange(given, abilities))
    except Exception as error:
        # A template is a program: its exceptions (TemplateError by its own raise_exception,
        # TypeError or KeyError by a mistake) say what these messages lack for it.
        raise InvalidInput(
            f"the model's chat template refused these messages: {error}", "messages"
        ) from error
    ids = encode(text, tokenizer)
    return RenderedPrompt(
        ids,
        _system_tokens(ids, given, template, tokenizer),
        _leaves_thought_open(ids, tokenizer),
    )


class _Template:
    """A model's chat template, with all variables that one request sets except for the messages."""

    def __init__(self, prompt: ChatPrompt, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._control = _control_tokens(tokenizer)
        source = _source(tokenizer, bool(prompt.tools))
        self._names_developer = source is None or "developer" in source
        self.tools = [_break_control_tokens(tool, self._control) for tool in prompt.tools] or None
        self._generation = prompt.add_generation_prompt and not prompt.continue_final_message
        self._continue = prompt.continue_final_message
        self._kwargs = _break_control_tokens(prompt.template_kwargs, self._control)
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

    def text(self, messages: Sequence[dict[str, Any]], *, whole: bool = True) -> str:
        """Renders the conversation as text. Only with ``whole`` does the text end as the request
        wants it: by asking for an answer, or by leaving the last message open."""
        return self._tokenizer.apply_chat_template(  # type: ignore[no-any-return]
            [
                message
                if message.get("role") == "assistant"
                else _break_control_tokens(message, self._control)
                for message in messages
            ],
            tools=self.tools,
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
def _abilities(tokenizer: Any, tools: bool) -> TemplateAbilities:
    """Finds the kinds of conversations that the tokenizer's chat template prints in full, by
    rendering small conversations, which declare a tool if ``tools``."""
    template = _Template(ChatPrompt((), tools=(PROBED_TOOL,) if tools else ()), tokenizer)
    every = TemplateAbilities()
    forms = _answer_forms(tokenizer, tools, ())

    def printed(messages: list[dict[str, Any]]) -> str:
        given = [template.message(message, every) for message in messages]
        return template.text(restore(given, forms))

    return probe(printed)


@lru_cache(maxsize=64)
def _answer_forms(
    tokenizer: Any, tools: bool, switches: tuple[tuple[str, bool], ...]
) -> AnswerForms:
    """Finds the forms of earlier answers that the tokenizer's chat template takes, by rendering
    small conversations, which declare a tool if ``tools`` and set the variables ``switches``."""
    prompt = ChatPrompt((), (PROBED_TOOL,) if tools else (), template_kwargs=dict(switches))
    template = _Template(prompt, tokenizer)
    markers = None
    if thought := output_format(tokenizer).thought:
        markers = thought.start + _opened_with(template, thought.start), thought.end
    return probe_answers(
        partial(template.text, whole=False), PROBED_TOOL["function"]["name"], markers
    )


def _opened_with(template: _Template, start: str) -> str:
    """Returns the whitespace with which prompts end behind the start marker of reasoning."""
    try:
        text = template.text([{"role": "user", "content": "?"}])
    except Exception:
        return ""  # a template may refuse this conversation
    rest = text.rpartition(start)[2]
    return rest if rest.isspace() else ""


def _switches(kwargs: Mapping[str, Any]) -> tuple[tuple[str, bool], ...]:
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


def _system_tokens(
    ids: Sequence[int], messages: Sequence[dict[str, Any]], template: _Template, tokenizer: Any
) -> int:
    """Returns the number of leading ids that a conversation shares with a shorter conversation,
    which consists of the same system prompt, the same tools and an empty question."""
    leading = leading_system(messages)
    if not leading and not template.tools:
        return 0
    abilities = _abilities(tokenizer, bool(template.tools))
    asked = [*messages[:leading], {"role": "user", "content": ""}]
    try:
        start = template.text(arrange(asked, abilities), whole=False)
    except Exception:
        # A template may refuse the empty question; the conversation itself has rendered.
        return 0
    pairs = zip(ids, encode(start, tokenizer), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _leaves_thought_open(ids: Sequence[int], tokenizer: Any) -> bool:
    """True if the last start marker of reasoning in a prompt is followed by neither the end marker
    of reasoning nor the end of a turn."""
    if not tokenizer.has_thinking:
        return False
    start, end = list(tokenizer.think_start_tokens), list(tokenizer.think_end_tokens)
    for at in range(len(ids) - 1, -1, -1):
        id = ids[at]
        if id == start[0] and ids[at : at + len(start)] == start:
            return True
        if id == end[0] and ids[at : at + len(end)] == end:
            return False
        if id in tokenizer.eos_token_ids:
            return False
    return False


# Control tokens


@lru_cache(maxsize=8)
def _control_tokens(tokenizer: Any) -> re.Pattern[str]:
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


def _break_control_tokens(value: Any, control: re.Pattern[str]) -> Any:
    """Puts a character that splits the prompt (:data:`BREAK`) after the first character of each
    control token in a value's strings, so that the strings are encoded without control tokens."""
    if isinstance(value, str):
        text, found = value.replace(BREAK, ""), 1
        while found:  # the rest of a broken token may hold another
            text, found = control.subn(lambda match: f"{match[0][0]}{BREAK}{match[0][1:]}", text)
        return text
    if isinstance(value, Mapping):
        return {key: _break_control_tokens(item, control) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_break_control_tokens(item, control) for item in value]
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
