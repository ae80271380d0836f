"""Splits an answer's text into content, reasoning and tool calls while the text is generated."""

from __future__ import annotations

from mayfly_worker.text.automaton import NONE, ROOT
from mayfly_worker.text.markers import NORMAL, REASONING, TOOL, Markers
from mayfly_worker.text.tool_calls import ParsedCall, ToolCallParser


class OutputParser:
    """Splits the text of one answer into content, reasoning and tool calls. Only the markers
    between them are removed. Text is held back only while it could still become a marker; a tool
    call is held back until it is complete.

    ``content``, ``reasoning`` and ``calls`` gather the results until the caller empties them.
    ``full`` says that the answer has all the calls that it may have, so that the rest of the text
    is dropped. ``cut`` says that the answer ended inside a call, which therefore does not count as
    a call.
    """

    def __init__(
        self,
        markers: Markers,
        *,
        state: str | None = None,
        tools: ToolCallParser | None = None,
        forced: bool = False,
        parallel: bool = True,
    ) -> None:
        """``state`` is the state in which the answer begins: normal text, reasoning or tool call
        (None: the initial state of ``markers``). With ``forced`` all text except for reasoning is
        parsed as tool calls; without ``parallel`` only the first call counts."""
        self._markers = markers
        self._tools = tools
        self._forced = forced
        self._parallel = parallel
        self.content = ""
        self.reasoning = ""
        self.calls: list[ParsedCall] = []
        self.full = self.cut = False
        self._opening = ""
        self._call: list[str] = []
        self._held = ""
        self._enter(state or markers.initial)

    def _enter(self, state: str) -> None:
        self.state = state
        self._transitions = self._markers.transitions(state)
        self._node = ROOT

    @property
    def in_call(self) -> bool:
        return self.state == TOOL

    @property
    def in_reasoning(self) -> bool:
        return self.state == REASONING

    def feed(self, text: str) -> None:
        if (
            not self._held
            and not self.full
            and self._transitions.automaton.no_match_begins_in(text)
        ):
            self._put(text)
            return
        buffer = self._held + text
        begin, read = 0, len(self._held)
        while not self.full:
            automaton = self._transitions.automaton
            self._node, read, match = automaton.walk(self._node, buffer, read)
            if match == NONE:
                certain = len(buffer) - automaton.depth[self._node]
                self._put(buffer[begin:certain])
                self._held = buffer[certain:]
                return
            marker = automaton.strings[match]
            self._put(buffer[begin : read - len(marker)])
            self._follow(marker, self._transitions.targets[match])
            begin = read

    def end(self, *, complete: bool) -> None:
        """Ends the answer's text. ``complete`` says that the model itself ended it: a call without
        its end marker then counts if it parses. A call that was cut off never counts, since it
        might lack arguments."""
        if self.full:
            return
        self._put(self._held)
        self._held = ""
        if self.in_call:
            known = len(self.calls)
            self._close("", whole=complete or self._markers.endless_calls)
            self.cut = len(self.calls) == known
        elif self._forced and self._call:
            self._close("", whole=True)

    def _put(self, text: str) -> None:
        if not text:
            return
        if self.state == REASONING:
            self.reasoning += text
        elif self.state == TOOL or (self._forced and self.state == NORMAL):
            self._call.append(text)
        elif self.state == NORMAL:
            self.content += text

    def _follow(self, marker: str, target: str) -> None:
        """Moves the answer to the state ``target``, to which a ``marker`` in its text leads."""
        if self.in_call:
            self._close(marker, whole=True)
        elif target == TOOL:
            self._opening = marker
        self._enter(target)

    def _close(self, ending: str, *, whole: bool) -> None:
        """Ends the text of a tool call: adds its calls to ``calls`` or, if the text is not
        ``whole`` or does not parse, adds the text with its markers to ``content``."""
        text = "".join(self._call)
        calls = self._tools.parse(text) if self._tools is not None and whole else []
        if calls and not self._parallel:
            del calls[1:]
            self.full = True
        self.calls += calls
        if not calls:
            self.content += self._opening + text + ending
        self._opening = ""
        self._call.clear()
