"""Renders a request's prompt as token ids.

Conversations are rendered by the model's chat template (:mod:`mayfly_worker.text.chat_template`).
In raw prompts (completions) control tokens mean what they say; in conversations text cannot forge
them (:mod:`mayfly_worker.text.control_tokens`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any

from mayfly_protocol.requests import ChatPrompt, Prompt, TextPrompt
from mayfly_worker.request_errors import InvalidInput, PromptTooLong
from mayfly_worker.text.arrangement import arrange, leading_system
from mayfly_worker.text.chat_template import (
    ChatTemplate,
    abilities_of,
    answer_forms,
    settable_variables,
    switches_of,
    tools_in_full,
)
from mayfly_worker.text.control_tokens import encode
from mayfly_worker.text.detokenize import hugging_face
from mayfly_worker.text.dialects.dialect import NORMAL
from mayfly_worker.text.dialects.registry import output_format
from mayfly_worker.text.earlier_answers import restore
from mayfly_worker.text.markers import markers_of
from mayfly_worker.text.output_parser import OutputParser


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as token ids. The first ``system_tokens`` ids belong to the system prompt and the
    tools; other conversations with the same system prompt and tools begin with the same ids (0 if
    there is neither). ``in_reasoning`` says that the prompt ends inside reasoning, which the model
    goes on with; ``in_answer``, that it ends inside the answer's text, in a format in which answers
    begin with a header. ``header`` is the beginning of this header in the prompt."""

    ids: list[int]
    system_tokens: int = 0
    in_reasoning: bool = False
    in_answer: bool = False
    header: str = ""


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
        ids = tokenizer.encode(prompt.text, add_special_tokens=prompt.special)
        rendered = RenderedPrompt(ids)
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
    variables = settable_variables(prompt.template_kwargs, tokenizer, tools=bool(prompt.tools))
    tools = tools_in_full(prompt.tools, tokenizer)
    prompt = replace(prompt, template_kwargs=variables, tools=tools)
    try:
        template = ChatTemplate(prompt, tokenizer)
        abilities = abilities_of(tokenizer, bool(prompt.tools))
        forms = answer_forms(tokenizer, bool(prompt.tools), switches_of(variables))
        known = [template.message(message, abilities) for message in prompt.messages]
        given = template.completed(restore(known, forms), forms)
        arranged = arrange(given, abilities)
        text = template.text(arranged)
        in_reasoning = _leaves_thought_open(
            text, partial(template.text, arranged, whole=False), tokenizer
        )
    except Exception as error:
        # A template is a program: its exceptions (TemplateError by its own raise_exception,
        # TypeError or KeyError by a mistake) say what these messages lack for it.
        raise InvalidInput(
            f"the model's chat template refused these messages: {error}", "messages"
        ) from error
    ids = encode(text, tokenizer)
    begun = RenderedPrompt(ids, _system_tokens(ids, given, template, tokenizer))
    start = output_format(tokenizer).framing.start
    if not start or start not in text:
        return replace(begun, in_reasoning=in_reasoning)
    message = OutputParser(markers_of(tokenizer, False))
    message.feed(text.rpartition(start)[2])
    return replace(
        begun,
        in_reasoning=message.in_reasoning,
        in_answer=message.state == NORMAL,
        header=message.header,
    )


def _system_tokens(
    ids: Sequence[int], messages: Sequence[dict[str, Any]], template: ChatTemplate, tokenizer: Any
) -> int:
    """Returns the number of leading ids that a conversation shares with a shorter conversation,
    which consists of the same system prompt, the same tools and an empty question."""
    leading = leading_system(messages)
    if not leading and not template.tools:
        return 0
    abilities = abilities_of(tokenizer, bool(template.tools))
    asked = [*messages[:leading], {"role": "user", "content": ""}]
    try:
        start = template.text(arrange(asked, abilities), whole=False)
    except Exception:
        # A template may refuse the empty question; the conversation itself has rendered.
        return 0
    pairs = zip(ids, encode(start, tokenizer), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _leaves_thought_open(text: str, asked: Callable[[], str], tokenizer: Any) -> bool:
    """True if the last start mark of reasoning in a prompt is followed by neither an end mark of
    reasoning nor the end of a turn. ``asked`` renders the prompt without its end, which asks for
    the answer: only there do start marks count that are ordinary text.
    """
    thought = output_format(tokenizer).thought
    if thought is None:
        return False
    ends = hugging_face(tokenizer).convert_ids_to_tokens(sorted(tokenizer.eos_token_ids))
    turn = text[max((text.rfind(end) for end in ends if end), default=-1) + 1 :]
    if thought.leading and any(start in turn for start in thought.starts):
        turn = text.removeprefix(asked())
    begun = max(turn.rfind(start) for start in thought.starts)
    ended = max(turn.rfind(end) for end in thought.ends)
    return begun > ended or (thought.begins_open and begun == ended)
