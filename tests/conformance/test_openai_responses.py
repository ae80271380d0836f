"""``/v1/responses`` with the released ``openai`` package against a real server."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from support.server import Server

SUM: Any = {
    "type": "function",
    "name": "sum",
    "description": "Adds.",
    "parameters": {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    },
    "strict": None,
}
GLOB: Any = {"type": "function", "name": "glob", "parameters": None, "strict": None}


def test_a_text(script: Server) -> None:
    response = script.client.responses.create(
        model=script.model, input="[text]", metadata={"a": "b"}, instructions="Be brief."
    )
    assert response.output_text == "Just text."
    assert (response.status, response.error, response.incomplete_details) == (
        "completed",
        None,
        None,
    )
    assert (response.metadata, response.instructions) == ({"a": "b"}, "Be brief.")
    assert response.usage is not None
    assert response.usage.total_tokens == (
        response.usage.input_tokens + response.usage.output_tokens
    )
    [message] = response.output
    assert message.type == "message"
    assert (message.role, message.status) == ("assistant", "completed")


def test_a_stream_tells_what_the_whole_says(script: Server) -> None:
    fields: Any = {"model": script.model, "input": "[thinks]", "tools": [SUM]}
    with script.client.responses.stream(**fields) as stream:
        events = list(stream)
        final = stream.get_final_response()
    whole = script.client.responses.create(**fields)
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [item.type for item in final.output] == ["reasoning", "function_call"]

    def bare(item: Any) -> Any:
        """Removes the fields that differ from request to request."""
        return item.model_dump(exclude={"id", "call_id", "parsed_arguments"})

    assert [bare(item) for item in final.output] == [bare(item) for item in whole.output]
    assert final.usage is not None and whole.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_every_item_is_added_filled_and_done(script: Server) -> None:
    stream = script.client.responses.create(
        model=script.model, input="[said and called]", tools=[SUM], stream=True
    )
    added: dict[int, str] = {}
    texts: dict[int, str] = {}
    done: dict[int, Any] = {}
    for event in stream:
        match event.type:
            case "response.output_item.added":
                assert set(added) == set(done)
                added[event.output_index] = event.item.id or ""
                texts[event.output_index] = ""
            case "response.output_text.delta" | "response.function_call_arguments.delta":
                assert event.item_id == added[event.output_index]
                texts[event.output_index] += event.delta
            case "response.output_text.done":
                assert event.text == texts[event.output_index]
            case "response.function_call_arguments.done":
                assert event.arguments == texts[event.output_index]
            case "response.output_item.done":
                assert event.item.id == added[event.output_index]
                done[event.output_index] = event.item
            case "response.completed":
                assert event.response.output == list(done.values())
    assert [item.type for item in done.values()] == ["message", "function_call"]


def test_tools_there_and_back(script: Server) -> None:
    items: list[Any] = [{"role": "user", "content": "what is 7 and 4? [thinks]"}]
    fields: Any = {"model": script.model, "tools": [SUM, GLOB], "store": False}
    first = script.client.responses.create(
        **fields, input=items, include=["reasoning.encrypted_content"]
    )
    [call] = [item for item in first.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"x": 7, "y": 4}
    items += [item.to_dict() for item in first.output]
    items.append(
        {"type": "function_call_output", "call_id": call.call_id, "output": "the sum is 11"}
    )
    second = script.client.responses.create(**fields, input=items)
    assert second.output_text == "Seven and four make eleven."


def test_thoughts_have_an_item_of_their_own(script: Server) -> None:
    response = script.client.responses.create(
        model=script.model, input="[thinks]", reasoning={"effort": "high", "summary": "auto"}
    )
    thought = response.output[0]
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert thought.content[0].text == "Seven, four."
    assert response.reasoning is not None
    assert response.reasoning.effort == "high"
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > 0


def test_structured_outputs(tiny: Server) -> None:
    class Answer(BaseModel):
        ok: bool

    response = tiny.client.responses.parse(
        model=tiny.model, input="hi", text_format=Answer, temperature=0
    )
    assert isinstance(response.output_parsed, Answer)


def test_an_answer_that_is_cut_is_incomplete(tiny: Server) -> None:
    response = tiny.client.responses.create(model=tiny.model, input="hi", max_output_tokens=16)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    stream = tiny.client.responses.create(
        model=tiny.model, input="hi", max_output_tokens=16, stream=True
    )
    assert list(stream)[-1].type == "response.incomplete"


def test_log_probabilities(tiny: Server) -> None:
    response = tiny.client.responses.create(
        model=tiny.model,
        input="hi",
        max_output_tokens=8,
        temperature=0,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    [message] = response.output
    assert message.type == "message"
    [part] = message.content
    assert part.type == "output_text"
    assert part.logprobs
    assert len(part.logprobs) == 8
    assert all(len(token.top_logprobs) == 2 for token in part.logprobs)
    joined = b"".join(bytes(token.bytes) for token in part.logprobs)
    assert joined.decode("utf-8", "replace") == part.text


def test_N01_a_custom_tool_that_has_to_be_called(tiny: Server) -> None:
    tool: Any = {
        "type": "custom",
        "name": "pick",
        "format": {"type": "grammar", "syntax": "regex", "definition": 'x"[ab]{3}\\n'},
    }
    group: Any = {"type": "namespace", "name": "tools", "description": "d", "tools": [tool]}
    choice: Any = {"type": "custom", "name": "pick"}
    for stream in (False, True):
        made: Any = tiny.client.responses.create(
            model=tiny.model, input="hi", tools=[group], tool_choice=choice, stream=stream
        )
        response = list(made)[-1].response if stream else made
        [call] = response.output
        assert (call.type, call.namespace, call.name) == ("custom_tool_call", "tools", "pick")
        assert re.fullmatch('x"[ab]{3}\n', call.input)


def test_N02_a_conversation_that_is_too_long_is_cut(tiny: Server) -> None:
    [model] = tiny.client.models.list().data
    context = model.model_dump()["max_model_len"]
    asked = [{"role": "user", "content": "word " * (context // 3)} for _ in range(4)]
    said = {"role": "assistant", "content": "Well."}
    items: Any = [one for message in asked for one in (message, said)] + asked[:1]
    fields: Any = {"model": tiny.model, "input": items, "max_output_tokens": 1}
    with pytest.raises(openai.BadRequestError) as caught:
        tiny.client.responses.create(**fields)
    assert caught.value.code == "context_length_exceeded"
    response = tiny.client.responses.create(**fields, truncation="auto")
    assert response.truncation == "auto"
    assert response.usage is not None
    counted = tiny.client.responses.input_tokens.count(model=tiny.model, input=asked[:1])
    assert counted.input_tokens <= response.usage.input_tokens < context


def test_nothing_is_stored(script: Server) -> None:
    create: Any = script.client.responses.create
    for field, value in {
        "previous_response_id": "resp_1",
        "conversation": "conv_1",
        "store": True,
        "background": True,
        "prompt": {"id": "pmpt_1"},
    }.items():
        with pytest.raises(openai.BadRequestError) as caught:
            create(model=script.model, input="hi", **{field: value})
        assert caught.value.param == field
        assert "stored" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        script.client.responses.retrieve("resp_1")
