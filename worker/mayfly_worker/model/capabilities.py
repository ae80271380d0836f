"""Finds the capabilities of a model: from its files, and from a probe that ran it, if any did."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from mayfly_protocol.capabilities import Capabilities
from mayfly_protocol.settings import WorkerSettings
from mayfly_worker.engine import caches
from mayfly_worker.model.model_config import scaled_context
from mayfly_worker.model.probe import Probe, why_unbatchable
from mayfly_worker.prefix_cache.layers import leaves
from mayfly_worker.text.chat_template import template_variables
from mayfly_worker.text.dialects.registry import output_format
from mayfly_worker.text.tool_prompt import describes_tools

_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length")
"""Names of the context length in configurations."""


class Context(NamedTuple):
    """A context length in tokens, 0 if it is unlimited, and its source in words."""

    tokens: int
    source: str


def context_of(config: dict[str, Any], tokenizer: Any) -> Context:
    """Returns a model's context length: from its configuration, with what the scaling of its rotary
    position embeddings (RoPE) adds, else the tokenizer's limit if there is one, else 0."""
    text = config.get("text_config") or {}
    for holder in (config, text):
        for name in _LENGTHS:
            if isinstance(value := holder.get(name), int) and value > 0:
                scaled = scaled_context(value, text, config)
                more = f" of {value:,}, extended by rope_scaling" if scaled > value else ""
                return Context(scaled, f"{name}{more} in config.json")
    limit = getattr(tokenizer, "model_max_length", 0)
    if isinstance(limit, int) and 0 < limit < 1 << 30:
        return Context(limit, "model_max_length of the tokenizer")
    return Context(0, "")


def capabilities_of(
    tokenizer: Any,
    config: dict[str, Any],
    settings: WorkerSettings,
    cache: caches.Cache,
    probe: Probe | None = None,
) -> Capabilities:
    """Returns a model's capabilities; ``cache`` is an empty KV cache of the model. Without a
    ``probe`` they are those that show without running the model."""
    context = context_of(config, tokenizer)
    if settings.context:
        context = Context(settings.context, "the option context")
    because = probe.unbatchable_because if probe is not None else why_unbatchable(cache)
    form = output_format(tokenizer)
    calls = form.calls
    chat = bool(tokenizer.has_chat_template)
    return Capabilities(
        context=context.tokens,
        context_from=context.source,
        rows=1 if because else settings.max_rows,
        one_row_because=because,
        padding=probe.padding_safe if probe is not None else None,
        prefixes=_prefixes(cache, probe),
        window=max(map(_window, leaves(cache)), default=0),
        chat=chat,
        reasoning=form.reasons,
        reasoning_parser=form.reasoning_parser,
        tools=calls is not None,
        tool_parser=calls.name if calls is not None else "",
        template_tools=chat and not describes_tools(tokenizer),
        template_variables=template_variables(tokenizer),
    )


def _prefixes(
    cache: caches.Cache, probe: Probe | None
) -> Literal["any_length", "stored_lengths", "none"]:
    if probe is not None and not probe.cuttable:
        return "none"
    return "any_length" if caches.trimmable(cache) else "stored_lengths"


def _window(layer: Any) -> int:
    """Returns the tokens in the window of a layer's cache; 0 if the layer sees all tokens."""
    return next((n for name in ("max_size", "chunk_size") if (n := getattr(layer, name, 0))), 0)
