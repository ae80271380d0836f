"""The answers of OpenAI's ``POST /v1/responses``: one object, or a stream of these events::

    response.created, response.in_progress
      response.output_item.added                                     an item:
        response.content_part.added                                  reasoning or message
          response.reasoning_text.delta or .output_text.delta ...
          response.reasoning_text.done or .output_text.done
        response.content_part.done
        or response.function_call_arguments.delta ..., .done         function_call
        or response.custom_tool_call_input.delta ..., .done          custom_tool_call
      response.output_item.done
      ...
    response.completed, .incomplete or .failed

One output item is open at a time; a piece of another item closes the open one. A function call that
the answer leaves unfinished has no event that says ``done``, since clients act upon those.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Literal

from mayfly_protocol.serving import Delta, Usage
from mayfly_server.api.answer import Head
from mayfly_server.api.responses.responses_objects import (
    ItemEvent,
    ItemStatus,
    OutputPart,
    RequestEcho,
    ResponseAnswer,
    ResponseError,
    ResponseEvent,
    ResponsesEvent,
    ResponseStatus,
    ResponseUsage,
)
from mayfly_server.api.responses.responses_output import GeneratedItem, GeneratedItems, ItemPiece
from mayfly_server.api.responses.responses_tools import ToolNames
from mayfly_server.errors import ContextExceeded, InvalidRequest, RequestError
from mayfly_server.http import sse


def response_usage(usage: Usage) -> ResponseUsage:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class _ResponseWriter:
    """Makes the response object: id, status, token counts and the output items, with ``echoed``,
    the fields that repeat the request."""

    def __init__(self, head: Head, echoed: RequestEcho) -> None:
        self._head = head
        self._echoed = echoed

    def response(
        self,
        status: ResponseStatus,
        output: GeneratedItems,
        usage: Usage | None = None,
        error: ResponseError | None = None,
    ) -> ResponseAnswer:
        last = len(output.items) - 1
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "model": self._head.model,
            **self._echoed,
            "status": status,
            "error": error,
            "incomplete_details": (
                {"reason": "max_output_tokens"} if status == "incomplete" else None
            ),
            "output": [
                item.content("incomplete" if i == last and status != "completed" else "completed")
                for i, item in enumerate(output.items)
            ],
            "usage": response_usage(usage) if usage else None,
        }

    def ended(self, output: GeneratedItems, usage: Usage) -> ResponseAnswer:
        status: ResponseStatus = "incomplete" if output.incomplete else "completed"
        return self.response(status, output, usage)


class ResponseBody:
    """Collects the generated text into the one object of an answer that is not streamed."""

    def __init__(
        self, head: Head, echoed: RequestEcho, tools: ToolNames, *, included: Collection[str]
    ) -> None:
        self._writer = _ResponseWriter(head, echoed)
        self._output = GeneratedItems(head, tools, included)

    def add(self, prompt: int, delta: Delta) -> None:
        for piece in self._output.pieces(delta):
            self._output.add(piece)

    def content(self, usage: Usage) -> ResponseAnswer:
        return self._writer.ended(self._output, usage)


def _failure_code(
    error: RequestError,
) -> Literal["server_error", "rate_limit_exceeded", "invalid_prompt", "context_length_exceeded"]:
    """The nearest of the few error codes that OpenAI defines for a failed response."""
    if isinstance(error, ContextExceeded):
        return "context_length_exceeded"
    if isinstance(error, InvalidRequest):
        return "invalid_prompt"
    return "rate_limit_exceeded" if error.status == 429 else "server_error"


class ResponseEvents:
    """Writes the events of a stream of ``POST /v1/responses``."""

    def __init__(
        self, head: Head, echoed: RequestEcho, tools: ToolNames, *, included: Collection[str]
    ) -> None:
        self._writer = _ResponseWriter(head, echoed)
        self._output = GeneratedItems(head, tools, included)
        self._number = -1
        self._open: GeneratedItem | None = None

    def begin(self) -> str:
        response = self._writer.response("in_progress", self._output)
        return self._response_event("response.created", response) + self._response_event(
            "response.in_progress", response
        )

    def chunk(self, prompt: int, delta: Delta) -> str:
        return "".join(self._piece(piece) for piece in self._output.pieces(delta))

    def end(self, usage: Usage) -> str:
        incomplete = self._output.incomplete
        closed = self._close("incomplete" if incomplete else "completed")
        return closed + self._response_event(
            "response.incomplete" if incomplete else "response.completed",
            self._writer.ended(self._output, usage),
        )

    def alive(self, note: str) -> str:
        return sse.comment(note)

    def failure(self, error: RequestError) -> str:
        failed: ResponseError = {"code": _failure_code(error), "message": error.message}
        response = self._writer.response("failed", self._output, error=failed)
        return self._response_event("response.failed", response)

    def _piece(self, piece: ItemPiece) -> str:
        item, new = self._output.add(piece)
        opened = self._close("completed") + self._start(item) if new else ""
        if not piece.text:
            return opened
        match item.kind:
            case "reasoning":
                return opened + _encode(
                    {
                        "type": "response.reasoning_text.delta",
                        "sequence_number": self._next(),
                        "item_id": item.id,
                        "output_index": item.index,
                        "content_index": 0,
                        "delta": piece.text,
                    }
                )
            case "message":
                return opened + _encode(
                    {
                        "type": "response.output_text.delta",
                        "sequence_number": self._next(),
                        "item_id": item.id,
                        "output_index": item.index,
                        "content_index": 0,
                        "delta": piece.text,
                        "logprobs": piece.logprobs,
                    }
                )
            case "function_call":
                return opened + _encode(
                    {
                        "type": "response.function_call_arguments.delta",
                        "sequence_number": self._next(),
                        "item_id": item.id,
                        "output_index": item.index,
                        "delta": piece.text,
                    }
                )
            case "custom_tool_call" if piece.text:
                return opened + _encode(
                    {
                        "type": "response.custom_tool_call_input.delta",
                        "sequence_number": self._next(),
                        "item_id": item.id,
                        "output_index": item.index,
                        "delta": piece.text,
                    }
                )
            case "custom_tool_call" | "tool_search_call":
                return opened

    def _start(self, item: GeneratedItem) -> str:
        self._open = item
        empty = replace(item, pieces=[], logprobs=[])
        events = self._item_event("response.output_item.added", empty, "in_progress")
        if item.call is None:
            events += self._part_event("response.content_part.added", item, empty.part(""))
        return events

    def _close(self, status: ItemStatus) -> str:
        item, self._open = self._open, None
        if item is None or item.unfinished:
            return ""
        text = item.text
        done: ResponsesEvent | None = None
        match item.kind:
            case "reasoning":
                done = {
                    "type": "response.reasoning_text.done",
                    "sequence_number": self._next(),
                    "item_id": item.id,
                    "output_index": item.index,
                    "content_index": 0,
                    "text": text,
                }
            case "message":
                done = {
                    "type": "response.output_text.done",
                    "sequence_number": self._next(),
                    "item_id": item.id,
                    "output_index": item.index,
                    "content_index": 0,
                    "text": text,
                    "logprobs": item.logprobs,
                }
            case "function_call":
                done = {
                    "type": "response.function_call_arguments.done",
                    "sequence_number": self._next(),
                    "item_id": item.id,
                    "output_index": item.index,
                    "arguments": text,
                }
            case "custom_tool_call":
                done = {
                    "type": "response.custom_tool_call_input.done",
                    "sequence_number": self._next(),
                    "item_id": item.id,
                    "output_index": item.index,
                    "input": text,
                }
        events = _encode(done) if done else ""
        if item.call is None:
            events += self._part_event("response.content_part.done", item, item.part(text))
        return events + self._item_event("response.output_item.done", item, status)

    def _response_event(
        self,
        kind: Literal[
            "response.created",
            "response.in_progress",
            "response.completed",
            "response.incomplete",
            "response.failed",
        ],
        response: ResponseAnswer,
    ) -> str:
        event: ResponseEvent = {
            "type": kind,
            "sequence_number": self._next(),
            "response": response,
        }
        return _encode(event)

    def _item_event(
        self,
        kind: Literal["response.output_item.added", "response.output_item.done"],
        item: GeneratedItem,
        status: ItemStatus,
    ) -> str:
        event: ItemEvent = {
            "type": kind,
            "sequence_number": self._next(),
            "output_index": item.index,
            "item": item.content(status),
        }
        return _encode(event)

    def _part_event(
        self,
        kind: Literal["response.content_part.added", "response.content_part.done"],
        item: GeneratedItem,
        part: OutputPart,
    ) -> str:
        return _encode(
            {
                "type": kind,
                "sequence_number": self._next(),
                "item_id": item.id,
                "output_index": item.index,
                "content_index": 0,
                "part": part,
            }
        )

    def _next(self) -> int:
        self._number += 1
        return self._number


def _encode(event: ResponsesEvent) -> str:
    return f"event: {event['type']}\n{sse.event(event)}"
