"""How a model marks its reasoning and its tool calls in the text it writes.

The markers are mlx-lm's (``TokenizerWrapper`` infers them from vocabulary and template). They move
a text between states::

              think_start                tool_call_start
    normal --------------> reasoning ---------------------+
      |  ^                     | think_end                v
      |  +---------------------+----------------------- tool
      |           tool_call_end (none: the call goes on to the end)
      +-----------------------------------------------> tool
                  tool_call_start

Some formats have states of their own besides, such as the header of a message, whose text is
protocol and is dropped. The table that is built here is the one of
``mlx_lm.generate.make_text_state_machine``; it is built anew because tool calls can be turned off,
because the marker that was matched is needed to give back a call that does not parse, and because
that machine holds back more text than could still become a marker.
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
class Exits:
    """The ways out of a state: ``targets[i]`` is where marker ``i`` of the automaton leads."""

    automaton: Automaton
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Markers:
    """A format's states. ``initial`` is where an answer begins if the prompt leaves no open
    thought; ``endless_calls`` says that a tool call has no end marker."""

    states: dict[str, Exits]
    initial: str
    endless_calls: bool

    def exits(self, state: str) -> Exits:
        return self.states.get(state, _NO_EXITS)


_NO_EXITS = Exits(Automaton(()), ())

_Edges = dict[str, list[tuple[str, str]]]
"""For each state its markers, and the states that they lead to."""


@lru_cache(maxsize=8)
def markers_of(tokenizer: Any, tools: bool) -> Markers:
    """The markers of an mlx-lm ``TokenizerWrapper``; those of tool calls only with ``tools``."""
    return Markers(
        _exits(_edges(tokenizer, tools and tokenizer.has_tool_calling)),
        initial=tokenizer.response_initial_state or NORMAL,
        endless_calls=not tokenizer.tool_call_end,
    )


@lru_cache(maxsize=8)
def guided_markers(tokenizer: Any) -> Markers:
    """What is left of the markers where a grammar guides the output: the end of a thought that
    the prompt had opened. All that follows is the answer, whatever is in it."""
    edges = {REASONING: [(tokenizer.think_end, NORMAL)]} if tokenizer.has_thinking else {}
    return Markers(_exits(edges), initial=NORMAL, endless_calls=False)


def _exits(edges: _Edges) -> dict[str, Exits]:
    return {
        state: Exits(Automaton([m for m, _ in ways]), tuple(target for _, target in ways))
        for state, ways in edges.items()
    }


def _edges(tokenizer: Any, tools: bool) -> _Edges:
    edges: _Edges = {NORMAL: []}
    own = tokenizer.response_transitions
    if tokenizer.has_thinking:
        edges[NORMAL].append((tokenizer.think_start, REASONING))
        edges[REASONING] = [(tokenizer.think_end, NORMAL)]
    if tools:
        opening = (tokenizer.tool_call_start, TOOL)
        # A format that says itself where calls begin has them nowhere else.
        if all(target != TOOL for ways in own.values() for _, target in ways):
            edges[NORMAL].append(opening)
        if tokenizer.has_thinking:
            edges[REASONING].append(opening)
        closing = tokenizer.tool_call_end
        edges[TOOL] = [(closing, NORMAL)] if closing else []
    edges[NORMAL] += [(marker, NORMAL) for marker in tokenizer.structural_markers]
    for state, ways in own.items():
        allowed = [way for way in ways if tools or way[1] != TOOL]
        edges.setdefault(state, []).extend(allowed)
    return edges


@lru_cache(maxsize=8)
def marker_strings(tokenizer: Any) -> tuple[str, ...]:
    """Every marker of a tokenizer's format."""
    edges = _edges(tokenizer, tokenizer.has_tool_calling)
    return tuple({marker: None for ways in edges.values() for marker, _ in ways if marker})
