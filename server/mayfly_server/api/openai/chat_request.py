"""The body of ``POST /v1/chat/completions`` as pydantic models.

The models of messages only describe messages in the OpenAPI document and list their field names.
:mod:`mayfly_server.api.openai.chat_prompt` checks messages, with errors that name the place in the
request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from mayfly_protocol.requests import ToolChoice as Mode
from mayfly_server.api.openai.common_request import CommonFields
from mayfly_server.api.openapi import DocumentedAs
from mayfly_server.api.request_fields import (
    MAX_MESSAGES,
    Count,
    EmptyAsNull,
    Hint,
    NotStored,
    OtherToolChoice,
    OtherTools,
    Strict,
    TemplateKwargs,
    ToolName,
    Unsupported,
    refused,
)


class _ChatInput(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ChatTextPart(_ChatInput):
    type: Literal["text"]
    text: str
    cache_control: Any = None


class RefusalPart(_ChatInput):
    type: Literal["refusal"]
    refusal: str
    cache_control: Any = None


ChatContent = str | list[Annotated[ChatTextPart | RefusalPart, Field(discriminator="type")]]


class SystemMessage(_ChatInput):
    role: Literal["system", "developer"]
    content: ChatContent
    name: str | None = None


class UserMessage(_ChatInput):
    role: Literal["user"]
    content: ChatContent
    name: str | None = None


class ToolMessage(_ChatInput):
    role: Literal["tool"]
    content: ChatContent
    tool_call_id: str | None = None
    name: str | None = None


class EarlierFunctionCall(_ChatInput):
    model_config = ConfigDict(extra="allow")

    name: str
    arguments: str | dict[str, Any]


class EarlierToolCall(_ChatInput):
    model_config = ConfigDict(extra="allow")

    function: EarlierFunctionCall
    type: Literal["function"] = "function"
    id: str | None = None


class AssistantMessage(_ChatInput):
    role: Literal["assistant"]
    content: ChatContent | None = None
    name: str | None = None
    tool_calls: list[EarlierToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


ChatMessage = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
AsMessage = Annotated[None, BeforeValidator(refused("Send it as one of messages"))]
OtherLength = Annotated[
    None, BeforeValidator(refused("Use max_completion_tokens instead", but=(-1,)))
]

_Bounded = Field(min_length=1, max_length=MAX_MESSAGES)
Messages = Annotated[
    list[dict[str, Any]], _Bounded, DocumentedAs(Annotated[list[ChatMessage], _Bounded])
]


def _only_functions(value: Any) -> Any:
    if value == "custom":
        raise PydanticCustomError(
            "unsupported",
            "Only functions are supported; declare a function with one argument, a text",
        )
    return value


def _without_hosted(value: Any) -> Any:
    """Leaves out tools that only their own server could run, if there are functions beside them."""
    if not isinstance(value, list):
        return value
    hosted = [tool for tool in value if _is_hosted(tool)]
    return [tool for tool in value if tool not in hosted] if len(hosted) < len(value) else value


def _is_hosted(tool: Any) -> bool:
    if not isinstance(tool, dict):
        return False
    kind = tool.get("type")
    if not isinstance(kind, str) or kind in ("function", "custom", "namespace"):
        return False
    # A function under a type of another name is the client's own, except Kimi's hosted ones.
    return not tool.get("function") or kind == "builtin_function"


class Function(Strict):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Annotated[Literal["function"], BeforeValidator(_only_functions)]
    function: Function


@dataclass(frozen=True, slots=True)
class ChatToolChoice:
    """A chat request's ``tool_choice``; ``name`` is the one function that the model has to call, or
    None if the request names no function."""

    mode: Mode
    name: str | None = None


class ChatThinking(Strict):
    """Thinking as DeepSeek's and Zhipu's APIs ask for it."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Count | None = None
    clear_thinking: bool | None = None


class ChatReasoning(Strict):
    """Thinking as OpenRouter's API asks for it."""

    effort: Annotated[Effort | None, EmptyAsNull] = None
    enabled: bool | None = None
    max_tokens: Count | None = None
    exclude: Annotated[
        None, BeforeValidator(refused("Thoughts are part of every answer", but=(False,)))
    ] = None
    summary: Hint = None


class JsonSchema(Strict):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


def _tool_choice(value: Any) -> ChatToolChoice:
    match value:
        case "none" | "auto" | "required":
            return ChatToolChoice(value)
        case {"type": "function", "function": {"name": str(name), **rest}, **more}:
            if not rest and not more:
                return ChatToolChoice("required", name)
    raise PydanticCustomError(
        "tool_choice",
        'Input should be "none", "auto", "required", or '
        '{"type": "function", "function": {"name": ...}}',
    )


Tools = Annotated[
    list[Tool],
    Field(max_length=1024),
    BeforeValidator(_without_hosted, json_schema_input_type=list[Tool]),
]


class ChatRequest(CommonFields):
    """The body of ``POST /v1/chat/completions``."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": "SmolLM2-135M-Instruct",
                    "messages": [{"role": "user", "content": "What is the capital of France?"}],
                    "temperature": 0,
                    "max_completion_tokens": 64,
                },
                {
                    "messages": [{"role": "user", "content": "Weather in Paris?"}],
                    "tools": [
                        {
                            "type": "function",
                            "function": {
                                "name": "weather",
                                "parameters": {
                                    "type": "object",
                                    "properties": {"city": {"type": "string"}},
                                },
                            },
                        }
                    ],
                    "stream": True,
                },
            ]
        }
    )

    messages: Messages
    max_completion_tokens: Count | None = None
    max_tokens: Annotated[
        Count | None, Field(description="Older name of max_completion_tokens.")
    ] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    tools: Tools | None = None
    tool_choice: Annotated[
        Any,
        AfterValidator(lambda value: value if value is None else _tool_choice(value)),
        WithJsonSchema(
            {
                "anyOf": [
                    {"enum": ["none", "auto", "required", None]},
                    {
                        "type": "object",
                        "properties": {
                            "type": {"const": "function"},
                            "function": {
                                "type": "object",
                                "properties": {"name": {"type": "string"}},
                                "required": ["name"],
                                "additionalProperties": False,
                            },
                        },
                        "required": ["type", "function"],
                        "additionalProperties": False,
                    },
                ]
            }
        ),
    ] = None
    parallel_tool_calls: bool | None = None
    response_format: Annotated[
        ResponseFormat | None, BeforeValidator(lambda value: None if value == {} else value)
    ] = None

    reasoning_effort: Annotated[Effort | None, EmptyAsNull] = None
    reasoning: ChatReasoning | None = None
    thinking: ChatThinking | None = None
    enable_thinking: Annotated[bool | None, Field(description="As in chat_template_kwargs.")] = None
    chat_template_kwargs: TemplateKwargs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    # Hints without effect on the answer.
    prompt_cache_key: Annotated[
        str | None, Field(description="Requests with the same key go to the same worker.")
    ] = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Hint = None
    prediction: Hint = None
    safety_identifier: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    verbosity: Annotated[Literal["low", "medium", "high"] | None, EmptyAsNull] = None
    modalities: list[Literal["text"]] | None = None
    store: Annotated[
        Literal[False] | None, Field(description="Only false: no answer is stored.")
    ] = None

    audio: Unsupported = None
    moderation: Unsupported = None
    web_search_options: Annotated[
        None, BeforeValidator(refused("No web can be searched from here", empty=True))
    ] = None
    add_special_tokens: Annotated[
        None, BeforeValidator(refused("The chat template writes them", but=(False,)))
    ] = None
    functions: OtherTools = None
    function_call: OtherToolChoice = None
    chat_template: Annotated[
        None, BeforeValidator(refused("The model's own template is the only one"))
    ] = None

    # Fields of other APIs that would change the answer.
    system: AsMessage = None
    instructions: AsMessage = None
    input: AsMessage = None
    prompt: AsMessage = None
    previous_response_id: NotStored = None
    conversation: NotStored = None
    documents: Annotated[
        None, BeforeValidator(refused("Use chat_template_kwargs.documents instead"))
    ] = None
    best_of: Annotated[None, BeforeValidator(refused("Use n instead", but=(1,)))] = None
    suffix: Unsupported = None
    echo: Annotated[None, BeforeValidator(refused("Use /v1/completions", but=(False,)))] = None
    max_output_tokens: OtherLength = None
    max_new_tokens: OtherLength = None
    n_predict: OtherLength = None
    stop_sequences: Annotated[None, BeforeValidator(refused("Use stop instead"))] = None
