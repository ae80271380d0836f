"""Sorts the text that a model generates into the output items of ``POST /v1/responses``:
reasoning, messages, and calls of functions and custom tools."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

from mayfly_protocol.requests import FinishReason
from mayfly_protocol.serving import Delta, ToolCallDelta
from mayfly_server.api.answer import Head
from mayfly_server.api.openai.logprobs import AnswerLogprobs, ChatTokenLogprob
from mayfly_server.api.responses.responses_items import pack
from mayfly_server.api.responses.responses_objects import (
    CalledNamespace,
    ItemStatus,
    OutputItem,
    OutputPart,
    OutputReasoningText,
    OutputText,
)
from mayfly_server.api.responses.responses_request import ENCRYPTED_REASONING, LOGPROBS
from mayfly_server.api.responses.responses_tools import CustomInput, ToolNames

ItemKind = Literal["reasoning", "message", "function_call", "custom_tool_call", "tool_search_call"]
_ID_PREFIXES: dict[ItemKind, str] = {
    "reasoning": "rs",
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "tool_search_call": "tsc",
}
_CALL_KINDS: dict[str, ItemKind] = {
    "function": "function_call",
    "custom": "custom_tool_call",
    "tool_search": "tool_search_call",
}


class ItemPiece(NamedTuple):
    """A text that an output item gains; ``call`` is set if the item is a call of a tool."""

    kind: ItemKind
    text: str
    call: ToolCallDelta | None = None
    logprobs: list[ChatTokenLogprob] = []  # noqa: RUF012  never changed


@dataclass(slots=True, eq=False)
class GeneratedItem:
    """An output item (reasoning, message or call of a tool) with the text generated so far.
    ``call`` is the first piece of a call, and ``name`` the tool's as the client knows it. If
    ``packed``, reasoning is given a second time, in the form that every client sends back."""

    kind: ItemKind
    id: str
    index: int
    call: ToolCallDelta | None = None
    name: str = ""
    namespace: str | None = None
    pieces: list[str] = field(default_factory=list)
    logprobs: list[ChatTokenLogprob] = field(default_factory=list)
    unfinished: bool = False
    packed: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def part(self, text: str) -> OutputPart:
        """The one content part of a reasoning item or message, with the given text."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": self.logprobs if text else [],
        }

    def content(self, status: ItemStatus) -> OutputItem:
        text = self.text
        parts = [self.part(text)] if text else []
        if self.call is not None:
            return self._call_content(status, cast(str, self.call.id))
        if self.kind == "reasoning":
            return {
                "id": self.id,
                "type": "reasoning",
                "status": status,
                "summary": [],
                "content": cast(list[OutputReasoningText], parts),
                "encrypted_content": pack(text) if self.packed and text else None,
            }
        return {
            "id": self.id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": cast(list[OutputText], parts),
        }

    def _call_content(self, status: ItemStatus, call_id: str) -> OutputItem:
        grouped: CalledNamespace = {"namespace": self.namespace} if self.namespace else {}
        if self.kind == "custom_tool_call":
            return {
                "id": self.id,
                "type": "custom_tool_call",
                "status": status,
                "call_id": call_id,
                "name": self.name,
                "input": self.text,
                **grouped,
            }
        if self.kind == "tool_search_call":
            return {
                "id": self.id,
                "type": "tool_search_call",
                "status": status,
                "call_id": call_id,
                "execution": "client",
                "arguments": _whole_arguments(self.text),
            }
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": call_id,
            "name": self.name,
            "arguments": self.text,
            **grouped,
        }


def _whole_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call; empty while they are not whole."""
    try:
        arguments: dict[str, Any] = json.loads(text)
    except ValueError:
        return {}
    return arguments


class GeneratedItems:
    """Sorts generated text into output items: reasoning, messages, calls of tools."""

    def __init__(self, head: Head, tools: ToolNames, included: Collection[str]) -> None:
        self.items: list[GeneratedItem] = []
        self.finish: FinishReason | None = None
        self._name = head.id.rpartition("-")[2]
        self._tools = tools
        self._input: CustomInput | None = None
        self._kind: ItemKind = "function_call"
        self._logprobs = AnswerLogprobs() if LOGPROBS in included else None
        self._packed = ENCRYPTED_REASONING in included

    @property
    def incomplete(self) -> bool:
        """True if the answer was cut off."""
        return self.finish == "length" or bool(self.items and self.items[-1].unfinished)

    def pieces(self, delta: Delta) -> Iterator[ItemPiece]:
        """Splits a delta into pieces, each for one output item."""
        logprobs = self._logprobs.of_text(delta) if self._logprobs else []
        if delta.reasoning:
            yield from self._end_of_input()
            yield ItemPiece("reasoning", delta.reasoning)
        if delta.text:
            yield from self._end_of_input()
            yield ItemPiece("message", delta.text, logprobs=logprobs)
        for call in delta.tool_calls:
            yield from self._call(call)
        if delta.finish is not None:
            yield from self._end_of_input()
            self.finish = delta.finish

    def _call(self, call: ToolCallDelta) -> Iterator[ItemPiece]:
        """Yields a piece of a call; of a custom tool's arguments, the input in them alone."""
        if call.name is not None:
            yield from self._end_of_input()
            tool = self._tools.called(call.name)
            self._kind = _CALL_KINDS[tool.tool.type if tool else "function"]
            self._input = CustomInput() if self._kind == "custom_tool_call" else None
        if self._input is None:
            yield ItemPiece(self._kind, call.arguments, call)
        else:
            yield ItemPiece("custom_tool_call", self._input.add(call.arguments), call)
        if call.unfinished:
            self._input = None

    def _end_of_input(self) -> Iterator[ItemPiece]:
        """Yields the part of a custom tool's input that only the end of its arguments shows."""
        if self._input is not None and (rest := self._input.end()):
            yield ItemPiece("custom_tool_call", rest)
        self._input = None

    def add(self, piece: ItemPiece) -> tuple[GeneratedItem, bool]:
        """Adds a piece to the last output item, or to a new item if the piece belongs to another
        one. Returns the item, and True if it is new."""
        begins_call = piece.call is not None and piece.call.name is not None
        new = not self.items or self.items[-1].kind != piece.kind or begins_call
        if new:
            index = len(self.items)
            id = f"{_ID_PREFIXES[piece.kind]}_{self._name}_{index}"
            self.items.append(self._item(piece, id, index))
        item = self.items[-1]
        item.pieces.append(piece.text)
        item.logprobs += piece.logprobs
        item.unfinished = piece.call is not None and piece.call.unfinished
        return item, new

    def _item(self, piece: ItemPiece, id: str, index: int) -> GeneratedItem:
        name = (piece.call and piece.call.name) or ""
        tool = self._tools.called(name)
        return GeneratedItem(
            piece.kind,
            id,
            index,
            piece.call,
            name=tool.tool.name if tool else name,
            namespace=tool.namespace if tool else None,
            packed=self._packed,
        )
