"""The released ``anthropic`` package against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from support.server import DEADLINE_S, Server

SUM: Any = {
    "name": "sum",
    "description": "Adds.",
    "input_schema": {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
        "required": ["x", "y"],
    },
}
GLOB: Any = {"name": "glob", "input_schema": {"type": "object", "properties": {"pattern": {}}}}


@pytest.fixture(scope="module")
def client(script: Server) -> Iterator[anthropic.Anthropic]:
    with client_of(script) as client:
        yield client


def client_of(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=server.url, api_key="none", max_retries=0, timeout=DEADLINE_S
    )


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


def asked(server: Server, text: str, **fields: Any) -> dict[str, Any]:
    return {"model": server.model, "max_tokens": 100, "messages": [user(text)], **fields}


GREEDY: Any = {"extra_body": {"temperature": 0}}
"""The package's newest models do without a temperature, and so do its arguments."""


def test_a_message(script: Server, client: anthropic.Anthropic) -> None:
    message = client.messages.create(**asked(script, "[text]"))
    [block] = message.content
    assert block.type == "text"
    assert block.text == "Just text."
    assert (message.role, message.type, message.model) == ("assistant", "message", script.model)
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens > 1
    counted = client.messages.count_tokens(model=script.model, messages=[user("[text]")])
    cached = message.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == message.usage.input_tokens + cached
    assert message._request_id


def test_a_streamed_message(script: Server, client: anthropic.Anthropic) -> None:
    with client.messages.stream(**asked(script, "[text]")) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert stream.response.headers["content-type"].startswith("text/event-stream")
    whole = client.messages.create(**asked(script, "[text]"))
    assert [block.to_dict() for block in message.content] == [
        block.to_dict() for block in whole.content
    ]
    assert message.stop_reason == whole.stop_reason
    assert message.usage.output_tokens == whole.usage.output_tokens
    wire = [kind for kind in kinds if kind != "text"]
    assert wire[:2] == ["message_start", "content_block_start"]
    assert wire[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_the_raw_events_of_a_stream(script: Server, client: anthropic.Anthropic) -> None:
    events = list(client.messages.create(**asked(script, "[thinks]", tools=[SUM]), stream=True))
    open_block = None
    seen = []
    for event in events:
        match event.type:
            case "content_block_start":
                assert open_block is None
                open_block = event.index
                assert event.index == len(seen)
                seen.append(event.content_block.type)
            case "content_block_delta":
                assert event.index == open_block
            case "content_block_stop":
                assert event.index == open_block
                open_block = None
    assert seen == ["thinking", "tool_use"]
    assert events[0].type == "message_start"
    assert events[0].message.usage.input_tokens > 10
    assert events[0].message.content == []


def test_thoughts(script: Server, client: anthropic.Anthropic) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    message = client.messages.create(**asked(script, "[thinks]", tools=[SUM], thinking=thinking))
    thought, call = message.content
    assert thought.type == "thinking"
    assert thought.thinking == "Seven, four."
    assert call.type == "tool_use"
    hidden = client.messages.create(
        **asked(script, "[thinks]", tools=[SUM], thinking={**thinking, "display": "omitted"})
    )
    assert hidden.content[0].type == "thinking"
    assert hidden.content[0].thinking == ""
    assert hidden.content[1] == call.model_copy(update={"id": hidden.content[1].id})


def test_thoughts_can_be_turned_off(script: Server, client: anthropic.Anthropic) -> None:
    """The prompt then holds an empty thought."""

    def prompt(**fields: Any) -> int:
        asked: Any = {"model": script.model, "messages": [user("[text]")], **fields}
        return client.messages.count_tokens(**asked).input_tokens

    assert prompt(thinking={"type": "disabled"}) > prompt(thinking={"type": "adaptive"}) == prompt()


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_there_and_back(script: Server, client: anthropic.Anthropic, streamed: bool) -> None:
    conversation = [user("what is 7 and 4? [said and called]")]
    request: Any = {"model": script.model, "max_tokens": 100, "tools": [SUM, GLOB]}
    if streamed:
        with client.messages.stream(**request, messages=conversation) as stream:
            first = stream.get_final_message()
    else:
        first = client.messages.create(**request, messages=conversation)
    assert first.stop_reason == "tool_use"
    text, call = first.content
    assert text.type == "text"
    assert text.text == "Let me see.\n"
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("sum", {"x": 7, "y": 4})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "the sum is 11"}
    conversation += [{"role": "assistant", "content": first.content}, user([result])]
    second = client.messages.create(**request, messages=conversation)
    assert second.content[0].type == "text"
    assert second.content[0].text == "Seven and four make eleven."
    assert second.stop_reason == "end_turn"


def test_several_tools_at_once(script: Server, client: anthropic.Anthropic) -> None:
    message = client.messages.create(**asked(script, "[two calls]", tools=[SUM, GLOB]))
    calls = [block for block in message.content if block.type == "tool_use"]
    assert [(call.name, call.input) for call in calls] == [
        ("sum", {"x": 7, "y": 4}),
        ("glob", {"pattern": "*.txt"}),
    ]
    assert len({call.id for call in calls}) == 2
    one = client.messages.create(
        **asked(
            script,
            "[two calls]",
            tools=[SUM, GLOB],
            tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        )
    )
    assert [block.name for block in one.content if block.type == "tool_use"] == ["sum"]


def test_forced_tools(tiny: Server) -> None:
    with client_of(tiny) as client:
        for choice, allowed in (
            ({"type": "tool", "name": "sum"}, {"sum"}),
            ({"type": "any"}, {"sum", "glob"}),
        ):
            message = client.messages.create(
                **asked(tiny, "hi", tools=[SUM, GLOB], tool_choice=choice, **GREEDY)
            )
            calls = [block for block in message.content if block.type == "tool_use"]
            if message.stop_reason == "tool_use":
                assert {call.name for call in calls} <= allowed
            else:
                assert message.stop_reason == "max_tokens"
        none = client.messages.create(
            **asked(tiny, "hi", tools=[SUM], tool_choice={"type": "none"}, max_tokens=8)
        )
        assert {block.type for block in none.content} == {"text"}


def test_structured_outputs(tiny: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    format = {"type": "json_schema", "schema": schema}
    with client_of(tiny) as client:
        message = client.messages.create(
            **asked(tiny, "hi", output_config={"format": format}, **GREEDY)
        )
        assert message.stop_reason == "end_turn"
        assert message.content[0].type == "text"
        assert message.content[0].text.replace(" ", "").strip() in ('{"ok":true}', '{"ok":false}')


def test_the_budget_ends_an_answer(tiny: Server) -> None:
    with client_of(tiny) as client:
        message = client.messages.create(**asked(tiny, "hi", max_tokens=5))
        assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 5)


@pytest.mark.parametrize("streamed", [False, True])
def test_stop_sequences(script: Server, client: anthropic.Anthropic, streamed: bool) -> None:
    fields = asked(script, "[text]", stop_sequences=["nothing", "text"])
    if streamed:
        with client.messages.stream(**fields) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**fields)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "text")
    assert message.content[0].type == "text"
    assert message.content[0].text == "Just "


def test_the_beginning_of_an_answer_can_be_given(tiny: Server) -> None:
    with client_of(tiny) as client:
        fields = asked(tiny, "hi", max_tokens=24, **GREEDY)
        text = client.messages.create(**fields).content[0]
        assert text.type == "text"
        fields["messages"].append({"role": "assistant", "content": "Once upon a time"})
        went_on = client.messages.create(**fields).content[0]
        assert went_on.type == "text"
        completion = tiny.client.completions.create(
            model=tiny.model,
            prompt="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nOnce upon a time",
            temperature=0,
            max_tokens=24,
        )
        assert went_on.text == completion.choices[0].text != text.text


def test_system_prompts(script: Server, client: anthropic.Anthropic) -> None:
    def prompt(**fields: Any) -> int:
        asked: Any = {"model": script.model, "messages": [user("hi")], **fields}
        return client.messages.count_tokens(**asked).input_tokens

    blocks = [
        {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "brief."},
    ]
    assert prompt(system="Be brief.") == prompt(system=blocks) > prompt()


def test_errors_arrive_as_the_clients_own(script: Server, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**asked(script, "hi") | {"model": "nonsense"})
    assert missing.value.type == "not_found_error"
    assert missing.value.request_id
    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.create(**asked(script, "hi", extra_body={"temperature": 7}))
    assert bad.value.type == "invalid_request_error"
    assert bad.value.body["request_id"] == bad.value.request_id  # type: ignore[index,call-overload]
    with pytest.raises(anthropic.BadRequestError) as long:
        client.messages.create(**asked(script, "word " * 5000))
    assert long.value.error_code == "context_length_exceeded"
