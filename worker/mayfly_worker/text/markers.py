"""Markers of reasoning and tool calls in the text that a model writes.

The markers are those of the model's output format (:mod:`mayfly_worker.text.dialects`). Each marker
moves a text from one state to another::

                 start of                       start of
                 thought                        calls
    normal --------------------> reasoning ---------------------+
      |  ^                            | end of thought          v
      |  +----------------------------+---------------------- tool
      |             end of calls (none: the call goes on to the end)
      +------------------------------------------------------> tool
                   start of calls

Some formats have further states, such as the header of a message, whose text is protocol and is
dropped, or says what follows. mlx-lm has such a machine, too
(``mlx_lm.generate.make_text_state_machine``). This one differs because tool calls can be turned
off, because the marker that was matched is needed to give back a call that does not parse, and
because mlx-lm's machine holds back more text than could still become a marker.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mayfly_worker.text.automaton import Automaton
from mayfly_worker.text.dialects.dialect import (
    NORMAL,
    REASONING,
    ROUTED,
    TOOL,
    Framing,
    Thought,
)
from mayfly_worker.text.dialects.registry import output_format


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
    the prompt ends inside reasoning; ``endless_calls`` says that a tool call has no end marker.
    ``framing`` has the readers of headers, ``thought`` is the form of reasoning, whose marks count
    in certain places only."""

    states: dict[str, Transitions]
    initial: str
    endless_calls: bool
    framing: Framing | None = None
    thought: Thought | None = None

    def transitions(self, state: str) -> Transitions:
        return self.states.get(state, _NO_TRANSITIONS)


_NO_TRANSITIONS = Transitions(Automaton(()), ())

ANSWERED = "answered"
"""State of normal text in which the answer's content has begun, so that marks of its beginning are
text."""

_Edges = dict[str, list[tuple[str, str]]]
"""By state of the output, the markers that end the state, each with the state to which it leads."""


@lru_cache(maxsize=8)
def markers_of(tokenizer: Any, tools: bool) -> Markers:
    """Returns the markers of a model's output; ``tokenizer`` is mlx-lm's ``TokenizerWrapper``.
    Markers of tool calls are included only with ``tools``."""
    form = output_format(tokenizer)
    edges = _edges(tokenizer, tools)
    starts = form.calls.starts if form.calls else ()
    return Markers(
        _transitions(edges),
        initial=form.framing.initial,
        endless_calls=all(marker in starts for marker, _ in edges.get(TOOL, ())),
        framing=form.framing,
        thought=form.thought,
    )


@lru_cache(maxsize=8)
def guided_markers(tokenizer: Any) -> Markers:
    """Returns the markers of output that a grammar guides: only the end of reasoning that the
    prompt has begun. All text after this marker is the answer, whatever it contains."""
    thought = output_format(tokenizer).thought
    edges = {REASONING: _in_thought(thought)} if thought else {}
    return Markers(_transitions(edges), initial=NORMAL, endless_calls=False, thought=thought)


def _after_beginning(edges: list[tuple[str, str]], thought: Thought) -> list[tuple[str, str]]:
    beginning = {*thought.ends, *(thought.answer or ())[:1]}
    beginning |= {*(thought.starts if thought.leading else ())}
    return [edge for edge in edges if edge[0] not in beginning]


def _in_thought(thought: Thought) -> list[tuple[str, str]]:
    ends = [(mark, NORMAL) for mark in thought.ends]
    return [*ends, *((mark, REASONING) for mark in thought.starts)]


def _transitions(edges: _Edges) -> dict[str, Transitions]:
    return {
        state: Transitions(Automaton([m for m, _ in out]), tuple(target for _, target in out))
        for state, out in edges.items()
    }


def _edges(tokenizer: Any, tools: bool) -> _Edges:
    form = output_format(tokenizer)
    calls = form.calls if tools else None
    own = form.framing.transitions
    edges: _Edges = {NORMAL: []}
    if form.thought:
        edges[NORMAL] += [(mark, REASONING) for mark in form.thought.starts]
        edges[NORMAL] += [(mark, NORMAL) for mark in form.thought.ends]
        edges[NORMAL] += [(mark, NORMAL) for mark in form.thought.answer or () if mark]
        edges[REASONING] = _in_thought(form.thought)
    if calls:
        opening = [(marker, TOOL) for marker in calls.starts]
        # If the format's own states say where tool calls begin, they begin nowhere else.
        if all(target not in (TOOL, ROUTED) for out in own.values() for _, target in out):
            edges[NORMAL] += [*opening, *((marker, TOOL) for marker in calls.kept)]
        if form.thought:
            edges[REASONING] += opening
        # Without an end marker, the next call's start marker ends a call.
        edges[TOOL] = [(marker, NORMAL) for marker in calls.ends] or list(opening)
    edges[NORMAL] += [(marker, NORMAL) for marker in form.dropped]
    for state, out in own.items():
        allowed = [edge for edge in out if calls or edge[1] != TOOL]
        edges.setdefault(state, []).extend(allowed)
    if form.thought:
        edges[ANSWERED] = _after_beginning(edges[NORMAL], form.thought)
    return edges


@lru_cache(maxsize=8)
def marker_strings(tokenizer: Any) -> tuple[str, ...]:
    """Returns every string that marks reasoning, tool calls or other parts of a model's output, and
    those that are part of reasoning."""
    edges = _edges(tokenizer, True)
    thought = output_format(tokenizer).thought
    markers = {marker: None for out in edges.values() for marker, _ in out if marker}
    return (*markers, *(thought.inside if thought else ()))


@lru_cache(maxsize=8)
def marker_ids(tokenizer: Any) -> frozenset[int] | None:
    """Returns the ids of a model's markers if each of them is a special token, and the model writes
    them with these alone (:class:`Framing`); else None."""
    special = {t.content: id for id, t in tokenizer.added_tokens_decoder.items() if t.special}
    ids = [special.get(marker) for marker in marker_strings(tokenizer)]
    if output_format(tokenizer).framing.route is None or None in ids:
        return None
    return frozenset(id for id in ids if id is not None)
