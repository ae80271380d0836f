"""Answers of ``POST /v1/responses``: the events of a stream, and the whole.

::

    response.created, response.in_progress
      response.output_item.added                                     an item:
        response.content_part.added                                  reasoning or message
          response.reasoning_text.delta or .output_text.delta ...
          response.reasoning_text.done or .output_text.done
        response.content_part.done
        or response.function_call_arguments.delta ..., .done         function_call
      response.output_item.done
      ...
    response.completed, .incomplete or .failed

One item is open at a time, and what belongs to another one closes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from mayfly_protocol.serving import Delta, ToolCallDelta, Usage
from mayfly_server.api.answer import Head
from mayfly_server.api.logprobs import chat_logprobs
from mayfly_server.errors import InvalidRequest, RequestError
from mayfly_server.http import sse

Kind = Literal["reasoning", "message", "function_call"]
_ID = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


@dataclass(slots=True, eq=False)
class Item:
    """An item of the output, as far as it is known."""

    kind: Kind
    id: str
    call: ToolCallDelta | None = None
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def part(self, text: str) -> dict[str, Any]:
        """The only content part of a thought or a message."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": self.logprobs if text else [],
        }

    def content(self, status: str) -> dict[str, Any]:
        text = self.text
        parts = [self.part(text)] if text else []
        whole: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        if self.call is not None:
            named = {"call_id": self.call.id, "name": self.call.name}
            return whole | named | {"arguments": text}
        if self.kind == "reasoning":
            return whole | {"summary": [], "content": parts, "encrypted_content": None}
        return whole | {"role": "assistant", "content": parts}


class Piece(NamedTuple):
    """What an item gains."""

    kind: Kind
    text: str
    call: ToolCallDelta | None = None
    logprobs: Sequence[dict[str, Any]] = ()


class Output:
    """Sorts what is generated into items."""

    def __init__(self, head: Head, *, logprobs: bool) -> None:
        self.items: list[Item] = []
        self.finish: str | None = None
        self._name = head.id.rpartition("-")[2]
        self._wanted = logprobs
        self._pending: list[dict[str, Any]] = []

    def pieces(self, delta: Delta) -> Iterator[Piece]:
        """Log probabilities wait for the text that their tokens become part of; those of what
        becomes no text are dropped."""
        if self._wanted:
            self._pending += chat_logprobs(delta.logprobs)
        if delta.reasoning:
            self._pending = []
            yield Piece("reasoning", delta.reasoning)
        if delta.text:
            logprobs, self._pending = self._pending, []
            yield Piece("message", delta.text, logprobs=logprobs)
        for call in delta.tool_calls:
            self._pending = []
            yield Piece("function_call", call.arguments, call)
        self.finish = delta.finish or self.finish

    def item(self, piece: Piece) -> tuple[Item, bool]:
        """The item that a piece belongs to, and whether it is a new one. Takes the piece in."""
        begins_call = piece.call is not None and piece.call.name is not None
        new = not self.items or self.items[-1].kind != piece.kind or begins_call
        if new:
            name = f"{_ID[piece.kind]}_{self._name}_{len(self.items)}"
            self.items.append(Item(piece.kind, name, piece.call))
        item = self.items[-1]
        item.pieces.append(piece.text)
        item.logprobs += piece.logprobs
        return item, new


class Frame:
    """The response object around the output. ``echoed`` are the request's own fields."""

    def __init__(self, head: Head, echoed: dict[str, Any]) -> None:
        self._fields = {
            "id": head.id,
            "object": "response",
            "created_at": head.created,
            "model": head.model,
            **echoed,
        }

    def response(self, status: str, output: Output, usage: Usage | None = None) -> dict[str, Any]:
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        last = len(output.items) - 1
        items = [
            item.content(status if i == last and status == "incomplete" else "completed")
            for i, item in enumerate(output.items)
        ]
        return self._fields | {
            "status": status,
            "error": None,
            "incomplete_details": incomplete,
            "output": items,
            "usage": usage_object(usage) if usage else None,
        }

    def ended(self, output: Output, usage: Usage) -> dict[str, Any]:
        status = "incomplete" if output.finish == "length" else "completed"
        return self.response(status, output, usage)


class ResponseBody:
    def __init__(self, head: Head, echoed: dict[str, Any], *, logprobs: bool) -> None:
        self._frame = Frame(head, echoed)
        self._output = Output(head, logprobs=logprobs)

    def add(self, prompt: int, delta: Delta) -> None:
        for piece in self._output.pieces(delta):
            self._output.item(piece)

    def content(self, usage: Usage) -> dict[str, Any]:
        return self._frame.ended(self._output, usage)


def _failure_code(error: RequestError) -> str:
    """One of the few that OpenAI has for a response that failed."""
    if isinstance(error, InvalidRequest):
        return "invalid_prompt"
    return "rate_limit_exceeded" if error.status == 429 else "server_error"


class ResponseEvents:
    def __init__(self, head: Head, echoed: dict[str, Any], *, logprobs: bool) -> None:
        self._frame = Frame(head, echoed)
        self._output = Output(head, logprobs=logprobs)
        self._number = -1
        self._open: Item | None = None

    def begin(self) -> str:
        response = self._frame.response("in_progress", self._output)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def chunk(self, prompt: int, delta: Delta) -> str:
        return "".join(self._piece(piece) for piece in self._output.pieces(delta))

    def end(self, usage: Usage) -> str:
        incomplete = self._output.finish == "length"
        closed = self._close("incomplete" if incomplete else "completed")
        kind = "response.incomplete" if incomplete else "response.completed"
        return closed + self._event(kind, response=self._frame.ended(self._output, usage))

    def failure(self, error: RequestError) -> str:
        response = self._frame.response("failed", self._output)
        response["error"] = {"code": _failure_code(error), "message": error.message}
        return self._event("response.failed", response=response)

    def _piece(self, piece: Piece) -> str:
        item, new = self._output.item(piece)
        opened = self._close("completed") + self._enter(item) if new else ""
        match item.kind:
            case "reasoning":
                return opened + self._part_event("response.reasoning_text.delta", delta=piece.text)
            case "message":
                return opened + self._part_event(
                    "response.output_text.delta", delta=piece.text, logprobs=list(piece.logprobs)
                )
            case "function_call":
                return opened + self._item_event(
                    "response.function_call_arguments.delta", delta=piece.text
                )

    def _enter(self, item: Item) -> str:
        self._open = item
        empty = Item(item.kind, item.id, item.call)
        events = self._event(
            "response.output_item.added",
            output_index=len(self._output.items) - 1,
            item=empty.content("in_progress"),
        )
        if item.call is None:
            events += self._part_event("response.content_part.added", part=empty.part(""))
        return events

    def _close(self, status: str) -> str:
        item = self._open
        if item is None:
            return ""
        text = item.text
        match item.kind:
            case "reasoning":
                events = self._part_event("response.reasoning_text.done", text=text)
            case "message":
                events = self._part_event(
                    "response.output_text.done", text=text, logprobs=item.logprobs
                )
            case "function_call":
                events = self._item_event("response.function_call_arguments.done", arguments=text)
        if item.call is None:
            events += self._part_event("response.content_part.done", part=item.part(text))
        index = self._output.items.index(item)
        events += self._event(
            "response.output_item.done", output_index=index, item=item.content(status)
        )
        self._open = None
        return events

    def _part_event(self, kind: str, **fields: Any) -> str:
        return self._item_event(kind, content_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> str:
        item = self._open
        assert item is not None
        index = self._output.items.index(item)
        return self._event(kind, item_id=item.id, output_index=index, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        content = {"type": kind, "sequence_number": self._number, **fields}
        return f"event: {kind}\n{sse.event(content)}"
