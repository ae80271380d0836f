"""Records that describe a model's output: how it writes tool calls, thoughts and messages.

A model's output is a text with markers, and each marker leads from one state of the text to
another (:mod:`mayfly_worker.text.markers` draws them). A :class:`Dialect` describes tool calls, a
:class:`Thought` describes reasoning, and :class:`Framing` describes states of a model's own, such
as headers of messages; an :class:`OutputFormat` is what one model uses of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

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
    """A form in which models write reasoning: between one of the marks ``starts`` and one of the
    marks ``ends``, of which the first ones are what templates print.

    An end mark at the beginning of an answer is none of its text: the model says that it does not
    think.
    """

    name: str
    """Name for the option ``--reasoning-parser``: that of vLLM's parser, if vLLM has one for this
    form alone."""
    starts: tuple[str, ...]
    ends: tuple[str, ...]
    begins_open: bool = False
    """An answer begins inside reasoning although the prompt has no start mark, unless the prompt
    has an end mark."""
    answer: tuple[str, str] | None = None
    """Marks around an answer's content, which are none of its text at its very beginning and end;
    the second counts only after the first, if there is a first."""
    inside: tuple[str, ...] = ()
    """Tokens that belong to the text of a thought, even if they are special ones."""
    leading: bool = False
    """Start marks count only at the beginning of an answer, since they are ordinary text."""
    words: Words = ()
    """Strings in the chat template by which the form is chosen."""
    tokens: tuple[str, ...] = ()
    """Tokens by which the form is chosen if no form's words occur: all of them are in the
    vocabulary."""
    aliases: tuple[str, ...] = ()
    """Further names for the option, such as those of other servers."""

    @property
    def start(self) -> str:
        return self.starts[0]

    @property
    def end(self) -> str:
        return self.ends[0]


class Routed(NamedTuple):
    """Content of a message's header: the ``state`` of the message's text, the ``recipient`` if it
    names one, and the name of the ``tool`` that this may be. ``rest`` is the text in a header that
    no message follows, if the text is none of a header's."""

    state: str
    recipient: str = ""
    tool: str = ""
    rest: str = ""


class Route(Protocol):
    """Function that reads a message's header."""

    def __call__(self, header: str, *, cut: bool = False) -> Routed:
        """Returns the header's content; with ``cut`` the answer was cut off within the header."""


@dataclass(frozen=True, kw_only=True)
class Guide:
    """Form of an answer that a grammar enforces in a model's own framing: a thought, which may be
    missing, and the answer or a call. ``thought`` are the texts around the thought. ``answer`` are
    the headers that the answer may have, ``call`` those of a call, with ``{}`` for the tool's name;
    ``calls`` is the dialect of such calls."""

    calls: Dialect
    thought: tuple[str, str]
    answer: tuple[str, ...]
    call: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Framing:
    """States of an output besides content, reasoning and tool calls, such as headers of messages.

    ``transitions`` has for each state its markers, each with the state to which it leads.
    ``initial`` is the state in which an answer begins. In a state that is neither NORMAL, REASONING
    nor TOOL the text is a header. If a header's marker leads to ROUTED, ``route`` returns what the
    header's text says, which begins after the marker that led into the header, or with it if the
    marker is one of ``kept``. A message to a tool of the request is a call, whose text is
    ``to=RECIPIENT``, a space, and the message's text. A framing with ``route`` has markers that are
    special tokens: ordinary tokens that spell one are text, if the vocabulary has all of them.
    """

    name: str = ""
    """Name of the form for the option ``--reasoning-parser``."""
    aliases: tuple[str, ...] = ()
    """Further names for the option, such as those of other servers."""
    transitions: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    initial: str = NORMAL
    route: Route | None = None
    may_be_header: Callable[[str], bool] | None = None
    """Returns False as soon as a text in the state HEADER is certainly no header, but content."""
    start: str = ""
    """Marker of the message in which prompts end; the answer begins within this message."""
    kept: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    """Tokens that end an answer, whatever the model's configuration says."""
    guide: Guide | None = None
    """Form of the answers that a grammar enforces; without, it is that of every other model."""
    efforts: Mapping[str, str] = field(default_factory=dict)
    """Values of the template variable ``reasoning_effort`` that the model does not know, each with
    the nearest that it knows."""
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

    @property
    def reasons(self) -> bool:
        """True if the model's answers have thoughts."""
        return self.thought is not None or REASONING in self.framing.transitions

    @property
    def reasoning_parser(self) -> str:
        """Name of the form of the model's thoughts; empty if there are none."""
        return self.thought.name if self.thought else self.framing.name
