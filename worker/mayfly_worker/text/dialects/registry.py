"""The choice of a model's output format: its dialect, and the form of its thoughts and messages.

The form of its thoughts is chosen likewise: by name, by the words of the chat template
(:attr:`Thought.words`), by the vocabulary (:attr:`Thought.tokens`).

A dialect is chosen, in this order, by its name in the worker's settings; by the entry
``tool_parser_type`` of the tokenizer's configuration, which is mlx-lm's; by the words of the chat
template (:attr:`Dialect.words`); by the vocabulary (:attr:`Dialect.tokens`). If none of these names
one and the chat template reads no tools, the prompt describes them, and asks for JSON between
``<tool_call>`` and ``</tool_call>`` (:mod:`mayfly_worker.text.tool_prompt`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlx_lm.tokenizer_utils import _infer_tool_parser

from mayfly_worker.text.dialects.dialect import (
    HEADER,
    NORMAL,
    REASONING,
    TOOL,
    Dialect,
    Framing,
    OutputFormat,
    Thought,
)
from mayfly_worker.text.dialects.families import DIALECTS, IN_ORDER
from mayfly_worker.text.dialects.harmony import HARMONY
from mayfly_worker.text.dialects.thoughts import THOUGHTS_IN_ORDER
from mayfly_worker.text.tool_prompt import describes_tools

AUTO = "auto"
"""Value of the options ``--tool-parser`` and ``--reasoning-parser`` for the form that the model's
chat template names."""
NONE = "none"
"""Value of these options that leaves tool calls, or thoughts, in the text."""

_FRAMINGS = (
    HARMONY,
    # Solar Open: <|begin|>assistant<|think|>…<|end|><|begin|>assistant<|content|>…<|end|>
    Framing(
        name="solar_open",
        initial=HEADER,
        transitions={
            HEADER: [("<|think|>", REASONING), ("<|content|>", NORMAL), ("<|tool_calls|>", TOOL)],
            REASONING: [("<|end|>", HEADER)],
            NORMAL: [("<|end|>", HEADER)],
        },
        start="<|begin|>",
        words=(("<|tool_call:args|>", "<|content|>"),),
    ),
)
"""Every framing that mlx-lm does not know, in the order in which their words are looked for."""

_NAMES = DIALECTS | {alias: dialect for dialect in IN_ORDER for alias in dialect.aliases}

_THOUGHT_NAMES: dict[str, Thought | Framing] = {
    name: form for form in (*THOUGHTS_IN_ORDER, *_FRAMINGS) for name in (form.name, *form.aliases)
}

_AROUND_CONTENT = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")

_FORMAT = "_mayfly_output_format"
"""Attribute of a tokenizer that holds the output format that was chosen at load."""


def dialect_named(name: str) -> Dialect | None:
    """Returns the dialect with the name that the option ``--tool-parser`` gives; None for
    ``none``. Raises ValueError, which lists the names, if there is no such dialect."""
    if name == NONE:
        return None
    if name not in _NAMES:
        known = ", ".join((AUTO, NONE, *sorted(DIALECTS)))
        raise ValueError(f"tool_parser: there is no {name!r}; there are {known}")
    return _NAMES[name]


def thought_named(name: str) -> Thought | Framing | None:
    """Returns the form of thoughts with the name that the option ``--reasoning-parser`` gives, with
    hyphens or underscores: marks around the thought, or messages with headers; None for ``none``.
    Raises ValueError, which lists the names, if there is
    no such form."""
    if name == NONE:
        return None
    if (known := name.replace("-", "_")) not in _THOUGHT_NAMES:
        names = ", ".join((AUTO, NONE, *sorted(_THOUGHT_NAMES)))
        raise ValueError(f"reasoning_parser: there is no {name!r}; there are {names}")
    return _THOUGHT_NAMES[known]


def choose_format(
    tokenizer: Any, tool_parser: str = AUTO, reasoning_parser: str = AUTO
) -> OutputFormat:
    """Chooses a model's output format, which :func:`output_format` returns from then on.
    ``tool_parser`` and ``reasoning_parser`` are the values of the options. Raises ValueError if
    there is no such form."""
    calls = _own_dialect(tokenizer) if tool_parser == AUTO else dialect_named(tool_parser)
    if calls is None and tool_parser == AUTO and describes_tools(tokenizer):
        calls = DIALECTS["json_tools"]
    form = _own_thought(tokenizer) if reasoning_parser == AUTO else thought_named(reasoning_parser)
    framing = form if isinstance(form, Framing) else _own_framing(tokenizer, calls)
    thought = None if isinstance(form, Framing) or framing.name else _leading(form, tokenizer)
    chosen = OutputFormat(
        calls,
        thought,
        framing,
        (*tokenizer.structural_markers, *_dropped(tokenizer)),
    )
    vocabulary = tokenizer.get_vocab()
    tokenizer.eos_token_ids |= {vocabulary[end] for end in framing.ends if end in vocabulary}
    setattr(tokenizer, _FORMAT, chosen)
    return chosen


def output_format(tokenizer: Any) -> OutputFormat:
    """Returns the output format of the model of a ``tokenizer``, which is mlx-lm's
    ``TokenizerWrapper``."""
    chosen: OutputFormat | None = vars(tokenizer).get(_FORMAT)
    return chosen or choose_format(tokenizer)


def _own_dialect(tokenizer: Any) -> Dialect | None:
    kept = str(getattr(tokenizer.tool_parser, "__module__", "")).rpartition(".")[2]
    if kept and kept != _infer_tool_parser(tokenizer._tokenizer):
        return DIALECTS.get(kept)  # the tokenizer's configuration names the parser
    template = _template(tokenizer)
    for dialect in IN_ORDER:
        if any(all(word in template for word in group) for group in dialect.words):
            return dialect
    vocabulary = tokenizer.get_vocab()
    for dialect in IN_ORDER:
        if dialect.tokens and all(token in vocabulary for token in dialect.tokens):
            return dialect
    return DIALECTS.get(kept)


def _template(tokenizer: Any) -> str:
    """Returns the text of all chat templates of a model."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\0".join(map(str, template.values())) if isinstance(template, dict) else str(template)


def _dropped(tokenizer: Any) -> tuple[str, ...]:
    """Returns the markers around the content of Command-A's answers."""
    template = _template(tokenizer)
    return tuple(marker for marker in _AROUND_CONTENT if marker in template)


def _own_thought(tokenizer: Any) -> Thought | None:
    template = _template(tokenizer)
    for thought in THOUGHTS_IN_ORDER:
        if any(all(word in template for word in group) for group in thought.words):
            return thought
    vocabulary = tokenizer.get_vocab()
    for thought in THOUGHTS_IN_ORDER:
        if thought.tokens and all(token in vocabulary for token in thought.tokens):
            return thought
    return None


def _leading(thought: Thought | None, tokenizer: Any) -> Thought | None:
    """Has the start marks of a form count only at the beginning of an answer if the vocabulary has
    no tokens for them: then they may as well be words of the answer."""
    if thought is None:
        return None
    added = [token.content for token in tokenizer._tokenizer.added_tokens_decoder.values()]
    tokens = [token for token in added if len(token) > 1]
    return replace(thought, leading=not any(t in mark for mark in thought.starts for t in tokens))


def _own_framing(tokenizer: Any, calls: Dialect | None) -> Framing:
    template = _template(tokenizer)
    for framing in _FRAMINGS:
        if calls is not None and framing.guide is not None and framing.guide.calls is calls:
            return framing
        if any(all(word in template for word in group) for group in framing.words):
            return framing
    return Framing(
        transitions=tokenizer.response_transitions,
        initial=tokenizer.response_initial_state or Framing.initial,
    )
