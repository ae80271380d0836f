"""Text of one choice, from its token ids to what a client is sent.

::

    id --> Detokenizer --> OutputParser (StopMatcher for the content) --> TextPiece

Stop strings are searched for in the answer's content only, not in reasoning and tool calls, and are
found however they are cut into tokens. A text that is not split into content, reasoning and calls
(a completion's) is searched as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mayfly_protocol.requests import ChatPrompt, FinishReason, Generation
from mayfly_protocol.serving import ToolCallDelta
from mayfly_worker.text.call_ids import call_id
from mayfly_worker.text.detokenize import Detokenizer
from mayfly_worker.text.dialects.dialect import NORMAL, REASONING
from mayfly_worker.text.dialects.families import FORCED
from mayfly_worker.text.dialects.registry import output_format
from mayfly_worker.text.markers import guided_markers, marker_ids, markers_of
from mayfly_worker.text.output_parser import OutputParser
from mayfly_worker.text.prompts import RenderedPrompt
from mayfly_worker.text.stops import StopMatcher
from mayfly_worker.text.tool_calls import ToolCallParser


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
        self._detokenizer = Detokenizer(
            tokenizer, hide_special=not generation.output.special_tokens
        )
        self._stops = (
            StopMatcher(ending.stop, include_stop=ending.include_stop) if ending.stop else None
        )
        self._parser = (
            _output_parser(generation, tokenizer, rendered, self._stops)
            if generation.output.split
            else None
        )
        self._markers = marker_ids(tokenizer) if self._parser is not None else None
        self._call_count = 0
        self._ended = False
        self.tokens = 0
        """Number of token ids fed to this object, including replayed ids of another worker and an
        end token."""
        self.reasoning_tokens = 0
        """Number of token ids that belong to the reasoning of this choice, including its end
        marker."""
        self.protocol = False
        """True if the token id that was fed last belongs to a header, or only ends the answer."""

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
            self.protocol = self._parser is not None and not self._include_stop
            text = self._detokenizer.add(id) if self._include_stop else ""
            return self._finish(text, "stop", by_model=True)
        text = self._detokenizer.add(id, in_call=in_call)
        if self._parser is None:
            return self._take(text) if text else NOTHING
        in_header = self._parser.in_header
        literal = self._markers is not None and id not in self._markers
        piece = self._take(text, literal=literal) if text else NOTHING
        self.protocol = self._parser.in_header or (
            in_header and not (piece.text or piece.reasoning)
        )
        return piece

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

    @property
    def _armed(self) -> bool:
        """True once the choice has so many tokens (``min_tokens``) that a stop string ends it."""
        return self.tokens >= self._min_tokens

    def _take(self, text: str, *, literal: bool = False) -> TextPiece:
        if self._parser is None:
            stopped = False
            if self._stops is not None:
                text, stopped = self._stops.feed(text, armed=self._armed)
            self._ended = stopped
            return TextPiece(text, finish="stop" if stopped else None)
        self._parser.armed = self._armed
        self._parser.feed(text, literal=literal)
        if self._parser.full:
            self._ended = True
            return self._emit("stop")
        return self._emit(None)

    def _finish(self, text: str, reason: FinishReason, *, by_model: bool) -> TextPiece:
        text += self._detokenizer.finish()
        self._ended = True
        if self._parser is None:
            if self._stops is not None:
                text, stopped = self._stops.feed(text, armed=self._armed)
                if stopped:
                    return TextPiece(text, finish="stop")
                text += self._stops.flush()
            return TextPiece(text, finish=reason)
        self._parser.armed = self._armed
        self._parser.feed(text)
        self._parser.end(complete=by_model)
        return self._emit("stop" if self._parser.stopped else reason)

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
    generation: Generation,
    tokenizer: Any,
    rendered: RenderedPrompt,
    stops: StopMatcher | None,
) -> OutputParser:
    prompt = generation.prompt
    chat = prompt if isinstance(prompt, ChatPrompt) else ChatPrompt(messages=())
    offered = chat.tools if chat.tool_choice != "none" else ()
    state = REASONING if rendered.in_reasoning else NORMAL if rendered.in_answer else None
    form = output_format(tokenizer)
    dialect = form.calls if offered else None
    required = bool(offered) and chat.tool_choice == "required"
    constrained = generation.output.constraint is not None
    markers = markers_of(tokenizer, dialect is not None)
    if required or constrained:
        guide = form.framing.guide
        if guide is None:
            markers = guided_markers(tokenizer)
        dialect = (guide.calls if guide else FORCED) if required else None
    return OutputParser(
        markers,
        state=state,
        header=rendered.header,
        tools=ToolCallParser(offered, dialect) if dialect else None,
        forced=dialect is FORCED,
        parallel=chat.parallel_tool_calls,
        early=generation.output.early_calls,
        stops=stops,
    )
