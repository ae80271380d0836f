"""All output dialects by name, and the choice of a model's dialect.

A dialect is chosen, in this order, by its name in the worker's settings; by the words of the chat
template (:attr:`Dialect.words`); by mlx-lm, which knows the families that it has a parser for, and
the entry ``tool_parser_type`` of a tokenizer's configuration.
"""

from __future__ import annotations

import re
from functools import partial
from types import ModuleType
from typing import Any

from mlx_lm.tool_parsers import (
    function_gemma,
    gemma4,
    glm47,
    json_tools,
    kimi_k2,
    kimi_k3,
    laguna,
    longcat,
    minicpm5,
    minimax_m2,
    mistral,
    muse_spark,
    pythonic,
    qwen3_coder,
)

from mayfly_worker.text.dialects.call_readers import (
    Reader,
    read_function_gemma,
    read_gemma4,
    read_json_calls,
    read_kimi_k2,
    read_mistral,
    read_pythonic,
)
from mayfly_worker.text.dialects.dialect import Dialect, Framing, OutputFormat, Thought
from mayfly_worker.text.dialects.json_calls import parse_json_calls
from mayfly_worker.text.dialects.markup_readers import MARKUPS, read_longcat, read_markup

AUTO = "auto"
"""Value of the option ``--tool-parser`` for the dialect that the model's chat template names."""
NONE = "none"
"""Value of the option ``--tool-parser`` that turns the parsing of tool calls off."""

FORCED = Dialect(name="forced", parse=parse_json_calls, read=read_json_calls)
"""Form of the calls that a grammar enforces, whatever the model's own form is: a JSON list, and
nothing else, without markers."""


def _of_mlx_lm(module: ModuleType, read: Reader, *aliases: str) -> Dialect:
    start, end = module.tool_call_start, module.tool_call_end
    return Dialect(
        name=module.__name__.rpartition(".")[2],
        parse=module.parse_tool_call,
        read=read,
        starts=(start,),
        ends=(end,) if end else (),
        aliases=aliases,
    )


def _markup(name: str) -> Reader:
    return partial(read_markup, MARKUPS[name])


_ALL = (
    _of_mlx_lm(function_gemma, read_function_gemma, "functiongemma"),
    _of_mlx_lm(gemma4, read_gemma4),
    _of_mlx_lm(glm47, _markup("glm47"), "glm45"),
    _of_mlx_lm(json_tools, read_json_calls, "hermes"),
    _of_mlx_lm(kimi_k2, read_kimi_k2),
    _of_mlx_lm(kimi_k3, _markup("kimi_k3")),
    _of_mlx_lm(laguna, _markup("glm47")),
    _of_mlx_lm(longcat, read_longcat),
    _of_mlx_lm(minicpm5, _markup("minicpm5")),
    _of_mlx_lm(minimax_m2, _markup("minimax_m2")),
    _of_mlx_lm(mistral, read_mistral),
    _of_mlx_lm(muse_spark, _markup("muse_spark")),
    _of_mlx_lm(pythonic, read_pythonic, "lfm2"),
    _of_mlx_lm(qwen3_coder, _markup("qwen3_coder"), "qwen3_xml"),
)
"""Every dialect, in the order in which their words are looked for in a chat template."""

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in _ALL}

_NAMES = DIALECTS | {alias: dialect for dialect in _ALL for alias in dialect.aliases}

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


def choose_format(tokenizer: Any, tool_parser: str = AUTO) -> OutputFormat:
    """Chooses a model's output format, which :func:`output_format` returns from then on.
    ``tool_parser`` is the value of the option. Raises ValueError if there is no such dialect."""
    chosen = OutputFormat(
        _own_dialect(tokenizer) if tool_parser == AUTO else dialect_named(tool_parser),
        _own_thought(tokenizer),
        _own_framing(tokenizer),
        tuple(tokenizer.structural_markers),
    )
    setattr(tokenizer, _FORMAT, chosen)
    return chosen


def output_format(tokenizer: Any) -> OutputFormat:
    """Returns the output format of the model of a ``tokenizer``, which is mlx-lm's
    ``TokenizerWrapper``."""
    chosen: OutputFormat | None = vars(tokenizer).get(_FORMAT)
    return chosen or choose_format(tokenizer)


def template_takes_tools(tokenizer: Any) -> bool:
    """True if a model's chat template writes the tools of a request into the prompt."""
    return re.search(r"\btools\b", _template(tokenizer)) is not None


def _own_dialect(tokenizer: Any) -> Dialect | None:
    template = _template(tokenizer)
    for dialect in _ALL:
        if any(all(word in template for word in group) for group in dialect.words):
            return dialect
    parser = tokenizer.tool_parser
    return DIALECTS.get(str(getattr(parser, "__module__", "")).rpartition(".")[2])


def _template(tokenizer: Any) -> str:
    """Returns the text of all chat templates of a model."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\0".join(map(str, template.values())) if isinstance(template, dict) else str(template)


def _own_thought(tokenizer: Any) -> Thought | None:
    if not tokenizer.has_thinking:
        return None
    return Thought(name="mlx_lm", start=tokenizer.think_start, end=tokenizer.think_end)


def _own_framing(tokenizer: Any) -> Framing:
    return Framing(
        transitions=tokenizer.response_transitions,
        initial=tokenizer.response_initial_state or Framing.initial,
    )
