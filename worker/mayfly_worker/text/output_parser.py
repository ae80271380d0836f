"""Splits an answer's text into content, reasoning and tool calls while the text is generated."""

from __future__ import annotations

from mayfly_worker.text.automaton import NONE, ROOT
from mayfly_worker.text.dialects.dialect import (
    HEADER,
    NORMAL,
    REASONING,
    ROUTED,
    TOOL,
    Framing,
    Routed,
    Thought,
)
from mayfly_worker.text.markers import ANSWERED, Markers
from mayfly_worker.text.stops import StopMatcher
from mayfly_worker.text.tool_calls import CallPiece, CallText, ToolCallParser


class OutputParser:
    """Splits the text of one answer into content, reasoning and tool calls. Nothing but the markers
    is taken out of the text, and whitespace beside calls with no other text before it since the
    last call or thought; only text that could still become a marker is held back, such whitespace,
    and tool calls until they are whole or, with ``early``, until their parts are certain.

    ``content``, ``reasoning`` and ``calls`` gather the results until the caller empties them;
    ``header`` is the text of the header that is open.
    ``full`` says that the rest of the text is dropped, since the answer has all the calls it may
    have, a stop string has ended its content (``stopped``), or it is ``broken``: its last call
    cannot be read or was cut off, although parts of the call were given out. Stop strings that are
    completed while the parser is not ``armed`` are ignored. ``cut`` says that the answer ended
    within a call, which then does not count as a call.
    """

    def __init__(
        self,
        markers: Markers,
        *,
        state: str | None = None,
        header: str = "",
        tools: ToolCallParser | None = None,
        forced: bool = False,
        parallel: bool = True,
        early: bool = False,
        stops: StopMatcher | None = None,
    ) -> None:
        """``state`` is the state in which the answer begins: normal text, reasoning or tool call
        (None: the initial state of ``markers``), ``header`` the beginning of a header in the
        prompt, which the answer goes on with. With ``forced`` all text except for reasoning is
        parsed as tool calls; without ``parallel`` only the first call counts. ``stops`` searches
        the content for stop strings; a call or a thought ends such a search."""
        self._markers = markers
        self._tools = tools
        self._forced = forced
        self._parallel = parallel
        self._early = early
        self.content = ""
        self.reasoning = ""
        self.calls: list[CallPiece] = []
        self.full = self.cut = self.broken = self.stopped = False
        self.armed = True
        self._stops = stops
        self._opening = self._quoted = ""
        self._called_from = NORMAL
        self._call: CallText | None = None
        self._held = ""
        self.header = header
        self._framing = markers.framing or Framing()
        self._called_in = NORMAL
        self._written: set[str] = set()
        self._parted: set[str] = set()
        self._gap = "" if tools is not None and not forced else None
        self._called = False
        self._thought = markers.thought
        self._begun = self._thinking = self._left_thought = False
        # In some formats marks stand around the answer; `_closing` is the one that has come.
        self._marked = self._thought is not None and (self._thought.answer or " ")[0] == ""
        self._closing = ""
        self._beginning = ""
        self._bare = tools.bare if tools is not None and not forced else ()
        self._enter(state or markers.initial)

    def _enter(self, state: str) -> None:
        self.state = state
        answered = state == NORMAL and self._begun and not self._left_thought
        self._transitions = self._markers.transitions(
            ANSWERED if answered and self._thought is not None else state
        )
        self._node = ROOT

    @property
    def in_call(self) -> bool:
        return self.state == TOOL

    @property
    def in_reasoning(self) -> bool:
        return self.state == REASONING

    @property
    def in_header(self) -> bool:
        return self.state not in (NORMAL, REASONING, TOOL)

    def feed(self, text: str, *, literal: bool = False) -> None:
        """Takes the next text, which is no marker if it is ``literal``, even if it spells one."""
        while text:
            text = self._read(text, literal=literal)

    def _read(self, text: str, *, literal: bool) -> str:
        """Reads text. Returns the text that is to be read again, since it was taken for a call or a
        header and is none; otherwise an empty text."""
        if (
            not self._held
            and not self.full
            and (literal or self._transitions.automaton.no_match_begins_in(text))
        ):
            self._put(text)
            return self._taken_back("")
        if self.state == NORMAL and not self._held:
            self._enter(NORMAL)
        buffer = self._held + text
        begin, read = 0, len(self._held)
        while not self.full:
            automaton = self._transitions.automaton
            self._node, read, match = automaton.walk(self._node, buffer, read)
            if match == NONE:
                certain = len(buffer) - automaton.depth[self._node]
                self._put(buffer[begin:certain])
                self._held = buffer[certain:]
                return self._taken_back("")
            marker = automaton.strings[match]
            self._put(buffer[begin : read - len(marker)])
            if again := self._taken_back(buffer[read - len(marker) :]):
                return again
            self._follow(marker, self._transitions.targets[match])
            begin = read
        return ""

    def _taken_back(self, rest: str) -> str:
        """If the text after a start marker of calls does not begin like one, makes the marker text
        of the thought or of the content in which it stands, and returns the text, with ``rest``
        that has come since, to be read again. So for a text in a header's place that is none."""
        may_be_header = self._framing.may_be_header
        if self.state == HEADER and may_be_header and not may_be_header(self.header):
            text, self.header = self.header + (rest or self._held), ""
            self._held = ""
            self._enter(NORMAL)
            return text
        if not self.in_call or self._call is None or not self._call.foreign:
            return ""
        text = self._call.text + (rest or self._held)
        self._leave_call(self._opening, self._called_from)
        return text

    def _leave_call(self, text: str, state: str) -> None:
        """Ends a text that was taken for a call; ``text`` of it belongs to the ``state``, in which
        the answer goes on."""
        self._call = None
        self._opening = self._held = ""
        self._enter(state)
        self._put(text)

    def end(self, *, complete: bool) -> None:
        """Ends the answer's text. ``complete`` says that the model itself ended it: a call without
        its end marker then counts if it parses. A call that was cut off never counts, since it
        might lack arguments."""
        if self.full:
            return
        self._put(self._held)
        self._held = ""
        while again := self._taken_back(""):
            self.feed(again)
            self._put(self._held)
            self._held = ""
        if self.in_call and self._quoted and self._call is not None and self._call.unreadable:
            # The string in which the end marker stood has no end: the marker was that of the call.
            before, marker, after = self._call.text.partition(self._quoted)
            self._leave_call(f"{self._opening}{before}{marker}", NORMAL)
            self._quoted = ""
            self.feed(after)
            self.end(complete=complete)
        elif self._bare and not self.in_call:
            self._end_beginning()
        elif self.in_call:
            self.cut = not self._close("", whole=complete or self._markers.endless_calls)
        elif self._call is not None:
            self.cut = not self._close("", whole=True)
        self._end_header(cut=not complete)
        if self._gap and not self._called:
            self._add_content(self._gap)
            self._gap = None
        self._end_search()

    def _put(self, text: str) -> None:
        if not text or self.full:
            return
        if self.state == REASONING:
            self._end_search()
            self.reasoning += self._parting(REASONING) + text
            self._thinking = self._thinking or not text.isspace()
        elif self.state == TOOL or (self._forced and self.state == NORMAL):
            self._put_into_call(text)
        elif self.state == NORMAL and self._bare:
            self._put_at_beginning(text)
        elif self.state == NORMAL:
            self._put_content(text)
        else:
            self.header += text

    def _put_content(self, text: str) -> None:
        """Takes text of the answer's content. Whitespace at its beginning and after a call is held
        back: only if other text follows is it part of the content."""
        if self._gap is not None:
            text = self._gap + text
            if not text or text.isspace():
                self._gap = text
                return
            self._gap = None
        self._add_content(text)

    def _add_content(self, text: str) -> None:
        if self.full:
            return
        if self._closing and text:
            self._closing, text = "", self._closing + text
            if self._closed(text):
                self._closing = text
                return
        if text and (parting := self._parting(NORMAL)):
            self._end_search()
            self.content += parting
        self._begun = self._begun or not (not text or text.isspace())
        if self._stops is not None:
            text, self.stopped = self._stops.feed(text, armed=self.armed)
            self.full = self.stopped
        self.content += text

    def _closed(self, text: str) -> bool:
        """True if a text is the mark behind the answer's content, with whitespace at most."""
        assert self._thought is not None and self._thought.answer is not None
        return text.rstrip() == self._thought.answer[1]

    def _end_search(self) -> None:
        """Ends the search for stop strings in the content before a thought, before a call or at the
        answer's end, so that no stop string is found across these."""
        if self._stops is not None and not self.stopped:
            self.content += self._stops.flush()

    def _put_into_call(self, text: str) -> None:
        if self._call is None:
            self._call = CallText(self._tools, early=self._early, parallel=self._parallel)
        self._call.feed(text)
        self._take_pieces(self._call)

    def _put_at_beginning(self, text: str) -> None:
        """Takes text of an answer that may begin with a call that has no marker, and that has no
        content before."""
        if self._call is None:
            text, self._beginning = self._beginning + text, ""
            head = text.lstrip()
            if any(head.startswith(bare) for bare in self._bare):
                self._put_into_call(text)
            elif any(bare.startswith(head) for bare in self._bare):
                self._beginning = text
            else:
                self._end_beginning(text)
        else:
            self._put_into_call(text)
        if self._call is not None and self._call.no_call:
            text, self._call = self._call.text, None
            self._end_beginning(text)

    def _end_beginning(self, text: str = "") -> None:
        """Ends the time in which a call without a marker may begin, with ``text`` that is none."""
        text, self._beginning = self._beginning + text, ""
        if text.strip() or self._call is not None:
            self._bare = ()
        if self._call is not None:
            self.cut = not self._close("", whole=True)
        self._put_content(text)

    def _take_pieces(self, call: CallText) -> None:
        if call.pieces:
            self._begun = True
            self._end_search()
        self.calls += call.pieces
        call.pieces.clear()
        self.broken = call.broken
        self.full = call.full or call.broken

    def _follow(self, marker: str, target: str) -> None:
        """Moves the answer to the state ``target``, to which a ``marker`` in its text leads."""
        if self.stopped:
            return
        if self.state == NORMAL and self._bare:
            self._end_beginning()
            if self.full:
                return
        if self._thought is not None and not self.in_call and self._is_text(marker, self._thought):
            self._enter(self.state)
            self._put(marker)
            return
        if self.in_call and target == NORMAL and self._call is not None and self._call.in_string:
            self._quoted = self._quoted or marker
            self._put_into_call(marker)
            self._enter(TOOL)
            return
        if self.in_call:
            self._close(marker if target == NORMAL else "", whole=True)
        if target == ROUTED and self._framing.route is not None:
            header, self.header = self.header, ""
            routed = self._framing.route(header)
            self._begin_message(routed)
            if self._tools is not None and routed.tool in self._tools.names:
                self._called_in = routed.state
                self._enter(TOOL)
            self._put(f"to={routed.recipient} " if routed.recipient else "")
            return
        self._end_header()
        if target == HEADER and marker in self._framing.kept:
            self.header = marker
        elif target == TOOL:
            self._opening = marker
            self._called_from = NORMAL if self.in_call else self.state
            if self._tools is not None and marker in self._tools.kept:
                self._opening = ""
                self._put_into_call(marker)
        self._thinking = False
        self._enter(target)

    def _begin_message(self, routed: Routed) -> None:
        """Begins a message after its header."""
        self._enter(routed.state)
        if routed.state in self._written:
            self._parted.add(routed.state)

    def _end_header(self, *, cut: bool = False) -> None:
        """Ends a header that no message follows: text in it that is none of a header's is taken as
        that of its message."""
        header, self.header = self.header, ""
        route = self._framing.route
        if self.state == HEADER and route is not None and (routed := route(header, cut=cut)).rest:
            self._begin_message(routed)
            self._put(routed.rest)

    def _parting(self, state: str) -> str:
        """Returns an empty line if the next text is of another message than the text of the same
        ``state`` before it."""
        self._written.add(state)
        if state not in self._parted:
            return ""
        self._parted.remove(state)
        return "\n\n"

    def _is_text(self, marker: str, thought: Thought) -> bool:
        """True if a mark of a thought, or around the answer, is part of the text in which it
        stands, since that is no place for it."""
        if self.in_reasoning:
            return marker in thought.starts and self._thinking
        if self.state != NORMAL:
            return False
        if marker in thought.starts:
            return thought.leading and self._begun
        if marker in thought.ends:
            left, self._left_thought = self._left_thought, False
            return self._begun and not left
        if thought.answer is None or marker not in thought.answer:
            return False
        if marker == thought.answer[0]:
            self._marked = self._marked or not self._begun
            return self._begun
        if self._marked and not self._closing:
            self._closing = marker
            return False
        return True

    def _close(self, ending: str, *, whole: bool) -> bool:
        """Ends the text between the markers of tool calls, which is parsed if it is ``whole``. Text
        that is no call becomes content, or part of the thought if it is a message of the thought,
        with the closing marker ``ending`` and, unless a call came before, the opening marker.
        Returns True if all of the text was calls that can be made."""
        call = self._call or CallText(self._tools, early=False, parallel=self._parallel)
        call.end(whole=whole)
        self._take_pieces(call)
        rest = call.text if not self.full else ""
        if self._called_in == REASONING and (not call.counted or rest):
            self.reasoning += self._parting(REASONING) + rest
        elif not call.counted or rest:
            self._put_content(f"{'' if call.counted else self._opening}{rest}{ending}")
        else:
            self._gap = ""
            self._called = True
            self._left_thought |= self._called_from == REASONING
        self._opening = self._quoted = ""
        self._called_in = NORMAL
        self._call = None
        return call.counted and not call.broken and not rest
