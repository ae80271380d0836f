"""Markers of reasoning and tool calls in the text that a model writes.

The markers are those that mlx-lm's ``TokenizerWrapper`` infers from vocabulary and template. Each
marker moves a text from one state to another::

              think_start                tool_call_start
    normal --------------> reasoning ---------------------+
      |  ^                     | think_end                v
      |  +---------------------+----------------------- tool
      |           tool_call_end (none: the call goes on to the end)
      +-----------------------------------------------> tool
                  tool_call_start

Some formats have further states, such as the header of a message, whose text is protocol and is
dropped. The states are those of ``mlx_lm.generate.make_text_state_machine``. This module builds
them anew because tool calls can be turned off, because the marker that was matched is needed to
give back a call that does not parse, and because mlx-lm's machine holds back more text than could
still become a marker.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mayfly_worker.text.automaton import Automaton

NORMAL = "normal"
REASONING = "reasoning"
TOOL = "tool"


@dataclass(frozen=True)
class Transitions:
    """Transitions out of one state of a model's output (normal text, reasoning, tool call): the
    ``automaton`` finds marker strings in the text, and its ``i``-th string leads to state
    ``targets[i]``."""

    automaton: Automaton
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Markers:
    """A model's output format: the states of its text (normal, reasoning, tool call) and the
    markers that lead from one state to another. ``initial`` is the first state of an answer, unless
    the prompt ends inside reasoning; ``endless_calls`` says that a tool call has no end marker."""

    states: dict[str, Transitions]
    initial: str
    endless_calls: bool

    def transitions(self, state: str) -> Transitions:
        return self.states.get(state, _NO_TRANSITIONS)


_NO_TRANSITIONS = Transitions(Automaton(()), ())

_Edges = dict[str, list[tuple[str, str]]]
"""By state of the output, the markers that end the state, each with the state to which it leads."""


@lru_cache(maxsize=8)
def markers_of(tokenizer: Any, tools: bool) -> Markers:
    """Returns the markers of a model's output, as its mlx-lm ``TokenizerWrapper`` knows them;
    markers of tool calls are included only with ``tools``."""
    return Markers(
        _transitions(_edges(tokenizer, tools and tokenizer.has_tool_calling)),
        initial=tokenizer.response_initial_state or NORMAL,
        endless_calls=not tokenizer.tool_call_end,
    )


@lru_cache(maxsize=8)
def guided_markers(tokenizer: Any) -> Markers:
    """Returns the markers of output that a grammar guides: only the end of reasoning that the
    prompt has begun. All text after this marker is the answer, whatever it contains."""
    edges = {REASONING: [(tokenizer.think_end, NORMAL)]} if tokenizer.has_thinking else {}
    return Markers(_transitions(edges), initial=NORMAL, endless_calls=False)


def _transitions(edges: _Edges) -> dict[str, Transitions]:
    return {
        state: Transitions(Automaton([m for m, _ in out]), tuple(target for _, target in out))
        for state, out in edges.items()
    }


def _edges(tokenizer: Any, tools: bool) -> _Edges:
    edges: _Edges = {NORMAL: []}
    own = tokenizer.response_transitions
    if tokenizer.has_thinking:
        edges[NORMAL].append((tokenizer.think_start, REASONING))
        edges[REASONING] = [(tokenizer.think_end, NORMAL)]
    if tools:
        opening = (tokenizer.tool_call_start, TOOL)
        # If the format's own transitions say where tool calls begin, they begin nowhere else.
        if all(target != TOOL for out in own.values() for _, target in out):
            edges[NORMAL].append(opening)
        if tokenizer.has_thinking:
            edges[REASONING].append(opening)
        closing = tokenizer.tool_call_end
        edges[TOOL] = [(closing, NORMAL)] if closing else []
    edges[NORMAL] += [(marker, NORMAL) for marker in tokenizer.structural_markers]
    for state, out in own.items():
        allowed = [edge for edge in out if tools or edge[1] != TOOL]
        edges.setdefault(state, []).extend(allowed)
    return edges


@lru_cache(maxsize=8)
def marker_strings(tokenizer: Any) -> tuple[str, ...]:
    """Returns every string that marks reasoning, tool calls or other parts of a model's output."""
    edges = _edges(tokenizer, tokenizer.has_tool_calling)
    return tuple({marker: None for out in edges.values() for marker, _ in out if marker})
