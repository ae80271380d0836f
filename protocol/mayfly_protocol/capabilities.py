"""Capabilities of a loaded model, each declared once, with its description for API documents.

The worker finds them and sends them in its ``ModelCard``, which the reaper (the supervisor of the
workers) publishes to front ends. The worker's log, ``/v1/models``, ``/mayfly/status``, ``mayfly
status`` and ``mayfly doctor`` show all of them, as JSON (:func:`shown`) or in words
(:func:`in_words`), so that a new capability needs only a field in this module, a line in the worker
that finds it, and its words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal


def _declared(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Capabilities of a model as its worker runs it. A front end that is older than the worker, or
    an examination without loading the model, knows some of them only."""

    context: int = _declared(
        0, "Longest prompt with its answer, in tokens; 0 if the model has no limit."
    )
    context_from: str = _declared("", "Where the length of the context comes from.")
    rows: int = _declared(0, "Largest number of sequences that run at once.")
    one_row_because: str = _declared(
        "", "Why only one sequence runs at a time, if the model's code cannot run a batch."
    )
    padding: bool | None = _declared(
        None,
        "True if prompts of different lengths are prefilled together; null if it is not known.",
    )
    prefixes: Literal["", "any_length", "stored_lengths", "none"] = _declared(
        "",
        "Lengths at which the beginning of an earlier prompt is found in the prefix cache: any, or "
        "those of earlier prompts, answers and system prompts alone, or none.",
    )
    window: int = _declared(
        0, "Tokens in the longest sliding window of the model's layers; 0 if there is none."
    )
    chat: bool = _declared(True, "True if the model has a chat template.")
    reasoning: bool = _declared(False, "True if thoughts are told apart from answers.")
    reasoning_parser: str = _declared(
        "", "Form in which thoughts are read from the model's text; empty if they are not."
    )
    tools: bool = _declared(
        False, "True if tool calls that no request demands are read from the model's text."
    )
    tool_parser: str = _declared(
        "", "Form in which tool calls are read from the model's text; empty if they are not."
    )
    template_tools: bool = _declared(
        False,
        "True if the chat template takes tools; otherwise the system message describes them.",
    )
    template_variables: tuple[str, ...] = _declared(
        (), "Names that a request may set in chat_template_kwargs."
    )


HELP: dict[str, str] = {each.name: each.metadata["help"] for each in fields(Capabilities)}
"""Description of each capability, by its name."""


def shown(capabilities: Capabilities) -> dict[str, Any]:
    """Returns capabilities as a JSON object."""
    values = {name: getattr(capabilities, name) for name in HELP}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


def from_shown(values: Mapping[str, Any]) -> Capabilities:
    """Returns the capabilities that a JSON object shows; those that it lacks have their
    defaults."""
    known: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if name in HELP
    }
    return Capabilities(**known)


def in_words(can: Capabilities) -> dict[str, str]:
    """Describes capabilities for people, each by a subject and a text."""
    words = {
        "context": f"{can.context:,} tokens" if can.context else "no limit",
        "sequences": f"{can.rows} at once",
    }
    if can.context_from:
        words["context"] += f" ({can.context_from})"
    if can.one_row_because:
        words["sequences"] = f"one at a time: {can.one_row_because}"
    if can.padding is not None:
        words["prefill"] = "several prompts together" if can.padding else "one prompt at a time"
    if can.prefixes:
        words["prefix cache"] = {
            "any_length": "at any length",
            "stored_lengths": "at the ends of earlier prompts, answers and system prompts",
            "none": "not used, as the model's tokens depend on where a prompt is cut",
        }.get(can.prefixes, can.prefixes)
    if can.window:
        words["window"] = f"{can.window:,} tokens"
    if not can.chat:
        return {**words, "chat": "no chat template: completions only"}
    words["thoughts"] = "told apart from answers" if can.reasoning else "none known"
    if can.reasoning_parser:
        words["thoughts"] = f"read as {can.reasoning_parser}"
    words["tools"] = (
        "in the chat template"
        if can.template_tools
        else "described in the system message, as the chat template reads none"
    )
    words["tool calls"] = (
        f"read as {can.tool_parser}"
        if can.tool_parser
        else "left in the text unless a request demands them (--tool-parser names their form)"
    )
    words["template variables"] = ", ".join(can.template_variables) or "none"
    return words
