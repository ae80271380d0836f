"""Records that describe a model's output: how it writes tool calls, thoughts and messages.

A model's output is a text with markers, and each marker leads from one state of the text to
another (:mod:`mayfly_worker.text.markers` draws them). A :class:`Dialect` describes tool calls, a
:class:`Thought` describes reasoning, and :class:`Framing` describes states of a model's own, such
as headers of messages; an :class:`OutputFormat` is what one model uses of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mayfly_worker.text.dialects.call_readers import ParseCalls, Reader

NORMAL = "normal"
"""State of an output whose text is the answer's content."""
REASONING = "reasoning"
TOOL = "tool"
HEADER = "header"
"""State of an output whose text is the header of a message: protocol, and no part of the answer.
The states of a :class:`Framing` that have other names are such, too."""
ROUTED = "routed"
"""Target of a marker that ends a header whose text says which state follows:
:attr:`Framing.route`."""

Words = tuple[tuple[str, ...], ...]
"""Alternatives, of which one has to be met: each is a group of strings that all have to occur."""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """A form in which models write tool calls.

    A call begins at one of the markers ``starts`` and goes on to one of the markers ``ends``;
    without ``ends``, to the end of the answer. ``parse`` has the last word about a call's whole
    text; ``read`` follows its text piece by piece, and finds where one of several calls ends.
    """

    name: str
    """Name for the option ``--tool-parser``: that of mlx-lm's parser, if mlx-lm has one."""
    parse: ParseCalls
    read: Reader | None = None
    starts: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    """Further start markers, which are part of the call's text."""
    ends: tuple[str, ...] = ()
    json: bool = False
    """Calls are JSON, so that an end marker within a string belongs to the string."""
    words: Words = ()
    """Strings in the chat template by which the dialect is chosen."""
    tokens: tuple[str, ...] = ()
    """Tokens by which the dialect is chosen if no dialect's words occur: all of them are in the
    vocabulary."""
    bare: tuple[str, ...] = ()
    """Beginnings of an answer that may be that of a call although no marker says so. The dialect's
    reader raises NoCall as soon as it is none."""
    aliases: tuple[str, ...] = ()
    """Further names for the option, such as those of other servers."""


@dataclass(frozen=True, kw_only=True)
class Thought:
    """A form in which models write reasoning: between the markers ``start`` and ``end``.
    ``begins_open`` says that an answer begins inside reasoning although the prompt has no start
    marker."""

    name: str
    start: str
    end: str
    begins_open: bool = False


@dataclass(frozen=True, kw_only=True)
class Framing:
    """States of an output besides content, reasoning and tool calls, such as headers of messages.

    ``transitions`` has for each state its markers, each with the state to which it leads.
    ``initial`` is the state in which an answer begins. In a state that is neither NORMAL, REASONING
    nor TOOL the text is a header. If a header's marker leads to ROUTED, ``route`` returns the next
    state for the header's text, which begins after the marker that led into the header. A header
    that is routed to TOOL belongs to the call: the call's text is the header, the marker, and the
    text after it, so that a dialect's parser finds the call's name in it.
    """

    transitions: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    initial: str = NORMAL
    route: Callable[[str], str] | None = None
    words: Words = ()
    """Strings in the chat template by which the framing is chosen."""


@dataclass(frozen=True)
class OutputFormat:
    """The form of one model's output. ``calls`` is None if the form of its tool calls is not known
    or it has none, ``thought`` if it does not reason. ``dropped`` are markers that are taken out of
    content."""

    calls: Dialect | None
    thought: Thought | None
    framing: Framing = Framing()
    dropped: tuple[str, ...] = ()
