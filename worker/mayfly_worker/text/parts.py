"""Splits an answer's text into content, reasoning and tool calls, as it comes."""

from __future__ import annotations

from mayfly_worker.text.automaton import NONE, ROOT
from mayfly_worker.text.markers import NORMAL, REASONING, TOOL, Markers
from mayfly_worker.text.toolcalls import Call, Tools


class Parts:
    """Follows one answer. Nothing but the markers is taken out of the text, and only what could
    still become a marker is held back, and tool calls until they are whole.

    What came of the text since they were last read and emptied stands in ``content``,
    ``reasoning`` and ``calls``. ``full`` says that the answer has all the calls it may have: the
    rest of the text is dropped. ``cut`` says that it ended within a call, which is none then.
    """

    def __init__(
        self,
        markers: Markers,
        *,
        state: str | None = None,
        tools: Tools | None = None,
        forced: bool = False,
        parallel: bool = True,
    ) -> None:
        """``state`` is where the answer begins (None: where the format has it begin). With
        ``forced`` all that is not reasoning is one text of tool calls; without ``parallel`` only
        the first call counts."""
        self._markers = markers
        self._tools = tools
        self._forced = forced
        self._parallel = parallel
        self.content = ""
        self.reasoning = ""
        self.calls: list[Call] = []
        self.full = self.cut = False
        self._opening = ""
        self._call: list[str] = []
        self._held = ""
        self._move(state or markers.initial)

    def _move(self, state: str) -> None:
        self.state = state
        self._exits = self._markers.exits(state)
        self._node = ROOT

    @property
    def in_call(self) -> bool:
        return self.state == TOOL

    @property
    def in_reasoning(self) -> bool:
        return self.state == REASONING

    def feed(self, text: str) -> None:
        if not self._held and not self.full and self._exits.automaton.clear_of(text):
            self._put(text)
            return
        buffer = self._held + text
        begin, read = 0, len(self._held)
        while not self.full:
            automaton = self._exits.automaton
            self._node, read, match = automaton.walk(self._node, buffer, read)
            if match == NONE:
                certain = len(buffer) - automaton.depth[self._node]
                self._put(buffer[begin:certain])
                self._held = buffer[certain:]
                return
            marker = automaton.strings[match]
            self._put(buffer[begin : read - len(marker)])
            self._pass(marker, self._exits.targets[match])
            begin = read

    def end(self, *, complete: bool) -> None:
        """The text is over. ``complete`` says that the model itself ended it: then a call whose
        end marker is missing is taken for whole if it parses. A call that was cut off never is:
        it might lack arguments."""
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

    def _pass(self, marker: str, target: str) -> None:
        """Goes through a marker into another state."""
        if self.in_call:
            self._close(marker, whole=True)
        elif target == TOOL:
            self._opening = marker
        self._move(target)

    def _close(self, ending: str, *, whole: bool) -> None:
        """The collected text is a call, or else it is content, with its markers as they were."""
        text = "".join(self._call)
        calls = self._tools.read(text) if self._tools is not None and whole else []
        if calls and not self._parallel:
            del calls[1:]
            self.full = True
        self.calls += calls
        if not calls:
            self.content += self._opening + text + ending
        self._opening = ""
        self._call.clear()
