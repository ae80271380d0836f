"""Text of one choice, from its token ids to what a client is sent.

::

    id --> Detokenizer --> StopMatcher --> OutputParser --> TextPiece

Stop strings are searched for in the whole text as the model writes it, including reasoning, markers
and tool calls, and are found however they are cut into tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mayfly_protocol.requests import ChatPrompt, FinishReason, Generation
from mayfly_protocol.serving import ToolCallDelta
from mayfly_worker.text.automaton import NONE, ROOT, Automaton
from mayfly_worker.text.call_ids import call_id
from mayfly_worker.text.detokenize import Detokenizer
from mayfly_worker.text.dialects.dialect import REASONING
from mayfly_worker.text.dialects.families import FORCED
from mayfly_worker.text.dialects.registry import output_format
from mayfly_worker.text.markers import guided_markers, markers_of
from mayfly_worker.text.output_parser import OutputParser
from mayfly_worker.text.prompts import RenderedPrompt
from mayfly_worker.text.tool_calls import ToolCallParser


class StopMatcher:
    """Searches one text for stop strings while the text is generated. The stop string that is
    completed first ends the text; of several that are completed by the same character, the longest
    counts. Only text that could still become a stop string is held back.

    ``matched`` is the stop string that has ended the text, None before.
    """

    __slots__ = ("_automaton", "_held", "_include", "_node", "matched")

    def __init__(self, strings: Sequence[str], *, include_stop: bool = False) -> None:
        """With ``include_stop`` the stop string stays in the text. Empty stop strings are ignored:
        they would end every text before it begins."""
        self._automaton = Automaton(strings)
        self._include = include_stop
        self._node = ROOT
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, *, armed: bool = True) -> tuple[str, bool]:
        """Takes the next text. Returns the text that is certain not to belong to a stop string, and
        True if a stop string has ended the text.

        At a stop string, the certain text ends before the string (or after it, with
        ``include_stop``); text after the string is dropped, and the matcher is not to be fed again.
        Stop strings that are completed while the matcher is not ``armed`` (before the answer has
        the request's ``min_tokens``) are ignored.
        """
        if not self._held and self._automaton.no_match_begins_in(text):
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
        """Returns the text that was held back, once the text has ended without a stop string."""
        held, self._held, self._node = self._held, "", ROOT
        return held


class TextPiece(NamedTuple):
    """Text, reasoning and tool calls that a choice gained by one or more tokens. ``finish`` is the
    finish reason if the choice has ended with this piece."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    finish: FinishReason | None = None

    def joined(self, later: TextPiece) -> TextPiece:
        """Returns this piece and a ``later`` piece as one."""
        return TextPiece(
            self.text + later.text,
            self.reasoning + later.reasoning,
            self.tool_calls + later.tool_calls,
            later.finish or self.finish,
        )


NOTHING = TextPiece()


class ChoiceText:
    """Turns the token ids that one choice generates into pieces of text for the client. Ids are fed
    in order, until a piece has a ``finish``.

    The pieces are a function of the request and the ids: the same ids give the same pieces. After
    :meth:`replay` of ids from another worker, the next pieces are as if these ids had been fed.
    """

    def __init__(
        self,
        generation: Generation,
        tokenizer: Any,
        rendered: RenderedPrompt,
        *,
        rid: str,
        choice: int,
    ) -> None:
        """``tokenizer`` is mlx-lm's ``TokenizerWrapper``, ``rendered`` the choice's prompt; ``rid``
        (the request's id) and ``choice`` (its index) decide the ids of tool calls."""
        ending = generation.ending
        self._rid, self._choice = rid, choice
        self._min_tokens = ending.min_tokens
        self._include_stop = ending.include_stop
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = (
            StopMatcher(ending.stop, include_stop=ending.include_stop) if ending.stop else None
        )
        self._parser = (
            _output_parser(generation, tokenizer, rendered) if generation.output.split else None
        )
        self._call_count = 0
        self._ended = False
        self.tokens = 0
        """Number of token ids fed to this object, including replayed ids of another worker and an
        end token."""
        self.reasoning_tokens = 0
        """Number of token ids that belong to the reasoning of this choice, including its end
        marker."""

    @property
    def stop(self) -> str | None:
        """The stop string that has ended the choice; None if no stop string has ended it."""
        return self._stops.matched if self._stops is not None else None

    def feed(self, id: int, *, eos: bool = False) -> TextPiece:
        """Takes the next token id and returns the text that it adds. ``eos`` says that the id ends
        the choice (an end token, or one of the request's own stop ids): such an id has no text,
        unless the request wants stop strings included."""
        assert not self._ended, "a choice was fed after its end"
        self.tokens += 1
        in_call = False
        if self._parser is not None:
            self.reasoning_tokens += self._parser.in_reasoning
            in_call = self._parser.in_call
        if eos:
            text = self._detokenizer.add(id) if self._include_stop else ""
            return self._finish(text, "stop", by_model=True)
        text = self._detokenizer.add(id, in_call=in_call)
        return self._take(text) if text else NOTHING

    def end(self, reason: FinishReason) -> TextPiece:
        """Ends the choice without another id, because its token budget is used up (``length``) or
        for another reason; the piece has all text that was held back."""
        return self._finish("", reason, by_model=reason == "stop")

    def replay(self, ids: Sequence[int]) -> FinishReason | None:
        """Takes ids that another worker generated; their pieces are dropped, since the client has
        received them from that worker. Returns the finish reason if the choice ended with these
        ids, else None."""
        for id in ids:
            piece = self.feed(id)
            if piece.finish is not None:
                return piece.finish
        return None

    def _take(self, text: str) -> TextPiece:
        if self._stops is not None:
            text, stopped = self._stops.feed(text, armed=self.tokens >= self._min_tokens)
            if stopped:
                return self._close(text, "stop", complete=False)
        if self._parser is None:
            return TextPiece(text) if text else NOTHING
        if not text:
            return NOTHING
        self._parser.feed(text)
        if self._parser.full:
            return self._close("", "stop", complete=False)
        return self._emit(None)

    def _finish(self, text: str, reason: FinishReason, *, by_model: bool) -> TextPiece:
        text += self._detokenizer.finish()
        if self._stops is not None:
            text, stopped = self._stops.feed(text, armed=self.tokens >= self._min_tokens)
            if stopped:
                return self._close(text, "stop", complete=False)
            text += self._stops.flush()
        return self._close(text, reason, complete=by_model)

    def _close(self, text: str, reason: FinishReason, *, complete: bool) -> TextPiece:
        self._ended = True
        if self._parser is None:
            return TextPiece(text, finish=reason)
        self._parser.feed(text)
        self._parser.end(complete=complete)
        return self._emit(reason)

    def _emit(self, reason: FinishReason | None) -> TextPiece:
        parser = self._parser
        assert parser is not None
        content, reasoning = parser.content, parser.reasoning
        parser.content = parser.reasoning = ""
        calls = self._take_calls() if parser.calls else ()
        complete = not parser.broken and not (reason == "length" and parser.cut)
        if reason is not None and self._call_count and complete:
            reason = "tool_calls"
        return TextPiece(content, reasoning, calls, reason)

    def _take_calls(self) -> tuple[ToolCallDelta, ...]:
        """Removes the tool calls and parts of calls that the output parser has found, and returns
        them as deltas for the client."""
        assert self._parser is not None
        deltas = []
        for piece in self._parser.calls:
            id = None
            if piece.name is not None:
                id = call_id(self._rid, self._choice, self._call_count, piece.id)
                self._call_count += 1
            deltas.append(
                ToolCallDelta(
                    self._call_count - 1, piece.arguments, id, piece.name, piece.unfinished
                )
            )
        self._parser.calls.clear()
        return tuple(deltas)


def _output_parser(
    generation: Generation, tokenizer: Any, rendered: RenderedPrompt
) -> OutputParser:
    prompt = generation.prompt
    chat = prompt if isinstance(prompt, ChatPrompt) else ChatPrompt(messages=())
    offered = chat.tools if chat.tool_choice != "none" else ()
    state = REASONING if rendered.in_reasoning else None
    if offered and chat.tool_choice == "required":
        return OutputParser(
            guided_markers(tokenizer),
            state=state,
            tools=ToolCallParser(offered, FORCED),
            forced=True,
            parallel=chat.parallel_tool_calls,
            early=generation.output.early_calls,
        )
    if generation.output.constraint is not None:
        return OutputParser(guided_markers(tokenizer), state=state)
    dialect = output_format(tokenizer).calls if offered else None
    return OutputParser(
        markers_of(tokenizer, dialect is not None),
        state=state,
        tools=ToolCallParser(offered, dialect) if dialect else None,
        parallel=chat.parallel_tool_calls,
        early=generation.output.early_calls,
    )
