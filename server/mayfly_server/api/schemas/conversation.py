"""The messages of a chat, as :mod:`mayfly_server.api.openai.messages` reads them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Said(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TextPart(_Said):
    type: Literal["text"]
    text: str
    cache_control: Any = None


class RefusalPart(_Said):
    type: Literal["refusal"]
    refusal: str
    cache_control: Any = None


Content = str | list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]]


class SystemMessage(_Said):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(_Said):
    role: Literal["user"]
    content: Content
    name: str | None = None


class ToolMessage(_Said):
    role: Literal["tool"]
    content: Content
    tool_call_id: str | None = None
    name: str | None = None


class EarlierFunction(_Said):
    model_config = ConfigDict(extra="allow")

    name: str
    arguments: str | dict[str, Any]


class EarlierCall(_Said):
    model_config = ConfigDict(extra="allow")

    function: EarlierFunction
    type: Literal["function"] = "function"
    id: str | None = None


class AssistantMessage(_Said):
    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[EarlierCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


ChatMessage = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]
