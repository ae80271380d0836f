"""Tools and structured output as the released ``openai`` package does them: its own helpers, whose
checks are stricter than the wire's."""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from support.api_client import function
from support.server import Server

SUM = function("sum", x="integer", y="integer")
GLOB = function("glob", pattern="string")
TOOLS: list[Any] = [SUM, GLOB]


def asked(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


class Colour(Enum):
    RED = "red"
    GREEN = "green"


class Point(BaseModel):
    x: Annotated[int, Field(ge=-99, le=99)]
    colour: Colour


class Drawing(BaseModel):
    """A schema with nested models, references, optional fields and a bounded list."""

    closed: bool
    origin: Point
    corners: Annotated[list[Point], Field(min_length=1, max_length=3)]
    style: Literal["plain", "dashed"] | None


def test_a_tool_is_called_and_its_result_read(script: Server) -> None:
    conversation = asked("what is 7 and 4? [call]")
    create = script.client.chat.completions.create
    first = create(model=script.model, messages=conversation, tools=TOOLS)
    [choice] = first.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "sum"
    arguments = json.loads(call.function.arguments)
    result = {
        "role": "tool",
        "tool_call_id": call.id,
        "content": f"the sum is {arguments['x'] + arguments['y']}",
    }
    # The message goes back as the client has it, nulls and all.
    again = [*conversation, choice.message.model_dump(), result]
    second = create(model=script.model, messages=again, tools=TOOLS)
    assert second.choices[0].message.content == "Seven and four make eleven."
    assert second.choices[0].finish_reason == "stop"
    as_object = create(
        model=script.model, messages=[*conversation, choice.message, result], tools=TOOLS
    )
    assert as_object.choices == second.choices


@pytest.mark.parametrize("trigger", ["[call]", "[two calls]", "[said and called]", "[thinks]"])
def test_streamed_tools_are_put_together_by_the_clients_own_stream(
    script: Server, trigger: str
) -> None:
    whole = script.client.chat.completions.create(
        model=script.model, messages=asked(trigger), tools=TOOLS
    )
    done = []
    with script.client.chat.completions.stream(
        model=script.model,
        messages=asked(trigger),
        tools=TOOLS,
        stream_options={"include_usage": True},
    ) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.done":
                done.append((event.name, event.arguments))
        final = stream.get_final_completion()
    expected = whole.choices[0].message.tool_calls or []
    calls = final.choices[0].message.tool_calls or []
    assert [(c.function.name, c.function.arguments) for c in calls] == done
    assert done == [
        (c.function.name, c.function.arguments) for c in expected if c.type == "function"
    ]
    assert (final.choices[0].message.content or None) == whole.choices[0].message.content
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.usage is not None and whole.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens
    # What was streamed goes back as well as what was not.
    history = [*asked(trigger), final.choices[0].message.model_dump(exclude={"parsed"})]
    results = [{"role": "tool", "tool_call_id": c.id, "content": "the sum is 11"} for c in calls]
    last = script.client.chat.completions.create(
        model=script.model, messages=[*history, *results], tools=TOOLS
    )
    assert last.choices[0].message.content == "Seven and four make eleven."


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_parsed_into_a_pydantic_model(tiny: Server, seed: int) -> None:
    """Random weights, kept to the schema that the client makes of the class."""
    completion = tiny.client.chat.completions.parse(
        model=tiny.model,
        messages=asked("draw something"),
        response_format=Drawing,
        temperature=1.5,
        seed=seed,
        max_tokens=400,
    )
    drawing = completion.choices[0].message.parsed
    assert isinstance(drawing, Drawing)
    assert completion.choices[0].finish_reason == "stop"
    with tiny.client.chat.completions.stream(
        model=tiny.model,
        messages=asked("draw something"),
        response_format=Drawing,
        temperature=1.5,
        seed=seed,
        max_tokens=400,
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == drawing


def test_an_answer_that_is_cut_off_is_not_parsed(tiny: Server) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        tiny.client.chat.completions.parse(
            model=tiny.model,
            messages=asked("draw something"),
            response_format=Drawing,
            max_tokens=5,
        )


@pytest.mark.parametrize("seed", range(3))
def test_arguments_are_parsed_into_a_pydantic_model(tiny: Server, seed: int) -> None:
    completion = tiny.client.chat.completions.parse(
        model=tiny.model,
        messages=asked("draw something"),
        tools=[openai.pydantic_function_tool(Drawing, name="draw")],
        tool_choice={"type": "function", "function": {"name": "draw"}},
        temperature=1.5,
        seed=seed,
        max_tokens=400,
    )
    assert completion.choices[0].finish_reason == "tool_calls"
    [call] = completion.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Drawing)


async def test_the_asynchronous_client(script: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{script.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model=script.model, messages=asked("[characters]"), stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        whole = await client.chat.completions.create(
            model=script.model, messages=asked("[characters]")
        )
        assert text == whole.choices[0].message.content != ""
