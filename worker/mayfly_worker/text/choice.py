"""The text of one choice, from its token ids to what a client is sent.

::

    id --> Detokenizer --> StopMatcher --> Parts --> Piece

Stop strings are looked for in the whole text, reasoning, markers and tool calls included, as the
model writes it.

Stop strings, found in the text however the tokens cut it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mayfly_protocol.requests import ChatPrompt, FinishReason, Generation
from mayfly_protocol.serving import ToolCallDelta
from mayfly_worker.text.automaton import NONE, ROOT, Automaton
from mayfly_worker.text.detokenize import Detokenizer
from mayfly_worker.text.markers import REASONING, guided_markers, markers_of
from mayfly_worker.text.parts import Parts
from mayfly_worker.text.prompts import Rendered
from mayfly_worker.text.toolcalls import Tools, call_id


class Stops:
    """The stop strings of one request, compiled once for all of its choices."""

    def __init__(self, strings: Sequence[str]) -> None:
        """Empty strings are ignored: they would stop everything before it begins."""
        self.automaton = Automaton(strings)

    def matcher(self, *, include_stop: bool = False) -> StopMatcher:
        return StopMatcher(self.automaton, include_stop)


class StopMatcher:
    """Follows one text. The stop that is completed first ends it; of several that are completed
    by the same character, the longest. Only what could still become a stop is held back.

    ``matched`` is the stop that has ended it.
    """

    __slots__ = ("_automaton", "_held", "_include", "_node", "matched")

    def __init__(self, automaton: Automaton, include_stop: bool) -> None:
        self._automaton = automaton
        self._include = include_stop
        self._node = ROOT
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, *, armed: bool = True) -> tuple[str, bool]:
        """The text that is certain now, and whether a stop has ended it.

        At a stop that is the text before it (or with it, if it is to be included); what follows
        is dropped, and the matcher is not to be fed again. Stops that are completed while it is
        not ``armed`` are passed over.
        """
        if not self._held and self._automaton.clear_of(text):
            return text, False
        buffer = self._held + text
        node, read = self._node, len(self._held)
        while True:
            node, read, match = self._automaton.walk(node, buffer, read)
            if match == NONE:
                break
            if armed:
                self._held = ""
                stop = self.matched = self._automaton.strings[match]
                return buffer[: read if self._include else read - len(stop)], True
        self._node = node
        certain = len(buffer) - self._automaton.depth[node]
        self._held = buffer[certain:]
        return buffer[:certain], False

    def flush(self) -> str:
        """What was held back, once the text has ended without a stop."""
        held, self._held, self._node = self._held, "", ROOT
        return held


class Piece(NamedTuple):
    """What a choice gained. ``finish`` ends it."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    finish: FinishReason | None = None

    def joined(self, later: Piece) -> Piece:
        """Both, in this order."""
        return Piece(
            self.text + later.text,
            self.reasoning + later.reasoning,
            self.tool_calls + later.tool_calls,
            later.finish or self.finish,
        )


NOTHING = Piece()


class ChoiceText:
    """Feed it every id that the choice generates, in order, until a piece has a ``finish``.

    It is a function of the request and the ids: the same ids give the same pieces, and after
    :meth:`replay` it goes on as if it had been fed.
    """

    def __init__(
        self, generation: Generation, tokenizer: Any, rendered: Rendered, *, rid: str, choice: int
    ) -> None:
        """``tokenizer`` is mlx-lm's ``TokenizerWrapper``, ``rendered`` the choice's prompt."""
        ending = generation.ending
        self._name = (rid, choice)
        self._min_tokens = ending.min_tokens
        self._include_stop = ending.include_stop
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = (
            Stops(ending.stop).matcher(include_stop=ending.include_stop) if ending.stop else None
        )
        self._parts = _parts(generation, tokenizer, rendered) if generation.output.split else None
        self._calls = 0
        self._ended = False
        self.tokens = 0
        """Ids fed, replayed ones and an end token included."""
        self.reasoning_tokens = 0
        """Those that a thought was made of, its end marker included."""

    @property
    def stop(self) -> str | None:
        """The stop string that has ended the choice, if one has."""
        return self._stops.matched if self._stops is not None else None

    def feed(self, id: int, *, eos: bool = False) -> Piece:
        """The next id. ``eos`` says that it ends the choice (an end token, or one of the
        request's own stop ids): it has no text then, unless stops are to be included."""
        assert not self._ended, "fed after its end"
        self.tokens += 1
        in_call = False
        if self._parts is not None:
            self.reasoning_tokens += self._parts.in_reasoning
            in_call = self._parts.in_call
        if eos:
            text = self._detokenizer.add(id) if self._include_stop else ""
            return self._finish(text, "stop", by_model=True)
        text = self._detokenizer.add(id, in_call=in_call)
        return self._take(text) if text else NOTHING

    def end(self, reason: FinishReason) -> Piece:
        """The choice ends without another id, at its budget (``length``) or otherwise: gives out
        all that was held back."""
        return self._finish("", reason, by_model=reason == "stop")

    def replay(self, ids: Sequence[int]) -> FinishReason | None:
        """Takes ids whose pieces were sent before. Returns why the choice had ended with them, if
        it had."""
        for id in ids:
            piece = self.feed(id)
            if piece.finish is not None:
                return piece.finish
        return None

    def _take(self, text: str) -> Piece:
        if self._stops is not None:
            text, stopped = self._stops.feed(text, armed=self.tokens >= self._min_tokens)
            if stopped:
                return self._close(text, "stop", complete=False)
        if self._parts is None:
            return Piece(text) if text else NOTHING
        if not text:
            return NOTHING
        self._parts.feed(text)
        if self._parts.full:
            return self._close("", "stop", complete=False)
        return self._emit(None)

    def _finish(self, text: str, reason: FinishReason, *, by_model: bool) -> Piece:
        text += self._detokenizer.finish()
        if self._stops is not None:
            text, stopped = self._stops.feed(text, armed=self.tokens >= self._min_tokens)
            if stopped:
                return self._close(text, "stop", complete=False)
            text += self._stops.flush()
        return self._close(text, reason, complete=by_model)

    def _close(self, text: str, reason: FinishReason, *, complete: bool) -> Piece:
        self._ended = True
        if self._parts is None:
            return Piece(text, finish=reason)
        self._parts.feed(text)
        self._parts.end(complete=complete)
        return self._emit(reason)

    def _emit(self, reason: FinishReason | None) -> Piece:
        parts = self._parts
        assert parts is not None
        content, reasoning = parts.content, parts.reasoning
        parts.content = parts.reasoning = ""
        calls = self._deltas() if parts.calls else ()
        if reason is not None and self._calls and not (reason == "length" and parts.cut):
            reason = "tool_calls"
        return Piece(content, reasoning, calls, reason)

    def _deltas(self) -> tuple[ToolCallDelta, ...]:
        """A parser takes a whole call, so that each is one delta."""
        assert self._parts is not None
        rid, choice = self._name
        deltas = tuple(
            ToolCallDelta(index, call.arguments, call_id(rid, choice, index), call.name)
            for index, call in enumerate(self._parts.calls, start=self._calls)
        )
        self._calls += len(deltas)
        self._parts.calls.clear()
        return deltas


def _parts(generation: Generation, tokenizer: Any, rendered: Rendered) -> Parts:
    prompt = generation.prompt
    chat = prompt if isinstance(prompt, ChatPrompt) else ChatPrompt(messages=())
    offered = chat.tools if chat.tool_choice != "none" else ()
    state = REASONING if rendered.in_reasoning else None
    if offered and chat.tool_choice == "required":
        return Parts(
            guided_markers(tokenizer),
            state=state,
            tools=Tools(offered, None),
            forced=True,
            parallel=chat.parallel_tool_calls,
        )
    if generation.output.constraint is not None:
        return Parts(guided_markers(tokenizer), state=state)
    calling = bool(offered) and tokenizer.has_tool_calling
    return Parts(
        markers_of(tokenizer, calling),
        state=state,
        tools=Tools(offered, tokenizer.tool_parser) if calling else None,
        parallel=chat.parallel_tool_calls,
    )
