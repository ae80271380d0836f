"""Messages as a chat template sees them. docs/reported-faults.md lists ids such as R01 in test
names."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mayfly_server.api.openai.chat_prompt import read_messages
from mayfly_server.errors import InvalidRequest
from mayfly_server.http.body import parse_json

CALL = {
    "id": "call_a",
    "type": "function",
    "function": {"name": "sum", "arguments": '{"x":7,"y":4}'},
}
PARSED = {
    "id": "call_a",
    "type": "function",
    "function": {"name": "sum", "arguments": {"x": 7, "y": 4}},
}


def one(**message: Any) -> dict[str, Any]:
    (made,) = read_messages([message])
    return made


def refused(*messages: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        read_messages(list(messages))
    assert caught.value.param is not None
    assert caught.value.message.startswith(caught.value.param)
    return caught.value


def call(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}}


def test_R01_R02_content_beside_tool_calls_may_be_null_or_absent() -> None:
    made = one(role="assistant", content="", tool_calls=[CALL])
    assert made == {"role": "assistant", "content": "", "tool_calls": [PARSED]}
    assert one(role="assistant", content=None, tool_calls=[CALL]) == made
    assert one(role="assistant", tool_calls=[CALL]) == made


def test_R02_no_arguments() -> None:
    made = one(role="assistant", tool_calls=[call("{}")])
    assert made["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("arguments", ["", "  ", "{}", {}, None])
def test_R05_empty_arguments_are_an_empty_object(arguments: Any) -> None:
    made = one(role="assistant", tool_calls=[call(arguments)])
    assert made["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    "arguments", ['{"x": 7,', "7", "[]", "null", '"a"', '{"a": NaN}', '{"a": "\\ud83d"}']
)
def test_R05_arguments_that_hold_no_object_are_kept_as_text(arguments: str) -> None:
    """As those of a call that was cut off, which a client's history holds from then on."""
    made = one(role="assistant", tool_calls=[call(arguments)])
    kept = {"unreadable_arguments": arguments}
    assert made["tool_calls"][0]["function"]["arguments"] == kept


@pytest.mark.parametrize("arguments", [7, [], True])
def test_R05_arguments_that_are_neither_text_nor_object_are_named(arguments: Any) -> None:
    error = refused(
        {"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call(arguments)]}
    )
    assert error.param == "messages[1].tool_calls[0].function.arguments"


def test_R15_parts_are_joined_in_order() -> None:
    parts = [{"type": "text", "text": "first piece. "}, {"type": "text", "text": "second piece."}]
    assert one(role="user", content=parts)["content"] == "first piece. second piece."
    assert one(role="user", content=[])["content"] == ""


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "banana"])
def test_R17_a_part_that_is_no_text_is_refused_by_its_type(kind: str) -> None:
    text = {"type": "text", "text": "what is shown?"}
    image = {"type": kind, kind: {"url": "data:image/png;base64,AAAA"}}
    error = refused({"role": "user", "content": [text, image]})
    assert error.param == "messages[0].content[1].type"
    assert kind in error.message


IMAGES = [
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
    {"type": "image", "source": {"type": "base64", "data": "AAAA"}},
]
NOTE = "[image left out: this model reads text only]"


@pytest.mark.parametrize("image", IMAGES)
def test_N05_an_image_in_a_tools_result_becomes_a_note(image: Any) -> None:
    text = {"type": "text", "text": "a plot"}
    made = one(role="tool", tool_call_id="call_a", content=[text, image])
    assert made["content"] == f"a plot{NOTE}"
    assert one(role="tool", content=[image])["content"] == NOTE
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    assert one(role="tool", content=[sound])["content"] == NOTE.replace("image", "audio")


def test_N05_so_does_one_that_a_gateway_moved_behind_the_tools_result() -> None:
    """LiteLLM and others make a user's message of it, since OpenAI's API takes images there."""
    tool = {"role": "tool", "tool_call_id": "call_a", "content": "see below"}
    moved = {"role": "user", "content": [{"type": "text", "text": "From the tool:"}, IMAGES[0]]}
    assert read_messages([tool, moved])[1]["content"] == f"From the tool:{NOTE}"
    assert refused(tool, {"role": "assistant", "content": "I see"}, moved).param is not None


@pytest.mark.parametrize("image", IMAGES)
def test_N05_so_does_one_in_an_earlier_answer_and_a_users_own_is_refused(image: Any) -> None:
    assert one(role="assistant", content=[image])["content"] == NOTE
    assert one(role="assistant", content="See:", images=[image])["content"] == f"See:{NOTE}"
    for role in ("user", "system", "developer"):
        error = refused({"role": role, "content": [image]})
        assert error.param == "messages[0].content[0].type"
        assert "This model reads text only" in error.message


def test_R18_developer_is_system() -> None:
    message = {"content": "answer only KIWI"}
    assert one(role="developer", **message) == one(role="system", **message)


def test_what_comes_back_of_an_answer_is_taken() -> None:
    """A client may send an answer back as it got it, with all its nulls."""
    made = one(
        **{"role": "assistant", "content": "Hello", "refusal": None, "annotations": []},
        **{"audio": None, "function_call": None, "tool_calls": None, "reasoning_content": "hm"},
    )
    assert made == {"role": "assistant", "content": "Hello", "reasoning_content": "hm"}
    assert one(role="assistant", content=None) == {"role": "assistant", "content": ""}
    assert one(role="assistant", content=None, refusal="No.")["content"] == "No."


NOTHING = (None, [], {}, "")
ANSWER_FIELDS = (
    *("parsed", "refusal", "audio", "annotations", "reasoning_details", "images", "function_call"),
    *("provider_specific_fields", "tool_calls", "thinking_blocks", "reasoning", "never_heard_of"),
)


@pytest.mark.parametrize("field", ANSWER_FIELDS)
@pytest.mark.parametrize("role", ["assistant", "user", "system", "tool"])
def test_N07_fields_that_are_null_or_empty_are_taken_in_every_message(
    role: str, field: str
) -> None:
    for nothing in NOTHING:
        made = one(**{"role": role, "content": "Hello", field: nothing})
        assert made == {"role": role, "content": "Hello"}
    part = {"type": "text", "text": None, field: None}
    made = one(**{"role": role, "content": [part], "name": "", "tool_call_id": None})
    assert made == {"role": role, "content": ""}


def test_N07_what_sdks_and_gateways_add_to_an_answer_is_taken() -> None:
    added: dict[str, Any] = {
        "parsed": {"ok": True},
        "annotations": [{"type": "url_citation", "url_citation": {"url": "https://a.example"}}],
        "provider_specific_fields": {"refusal": None},
        "reasoning_opaque": "xyz",
        "id": "msg_1",
        "metadata": {"a": 1},
    }
    made = one(role="assistant", content="Hello", **added)
    assert made == {"role": "assistant", "content": "Hello"}
    index = {"index": 0, "extra_content": {"google": {"thought_signature": "x"}}}
    assert one(role="assistant", tool_calls=[CALL | index])["tool_calls"] == [PARSED]
    assert one(role="assistant", tool_calls=[CALL | {"type": None}])["tool_calls"] == [PARSED]


@pytest.mark.parametrize(
    "added",
    [
        {"reasoning_content": "Hm."},
        {"reasoning": "Hm.", "reasoning_details": [{"type": "reasoning.text", "text": "other"}]},
        {"reasoning_details": [{"type": "reasoning.text", "text": "H"}, {"text": "m.", "id": 1}]},
        {"reasoning_text": "Hm."},
        {"thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}]},
        {
            "content": [
                {"type": "thinking", "thinking": "Hm."},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Hello"},
            ]
        },
    ],
)
def test_thoughts_come_back_in_any_form(added: dict[str, Any]) -> None:
    made = one(**{"role": "assistant", "content": "Hello", **added})
    assert made == {"role": "assistant", "content": "Hello", "reasoning_content": "Hm."}


@pytest.mark.parametrize("role", ["assistant", "user", "system", "tool"])
def test_N08_caching_marks_are_taken_on_messages_and_parts(role: str) -> None:
    marks = {
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
        "copilot_cache_control": {"type": "ephemeral"},
        "prompt_cache_breakpoint": {"mode": "explicit"},
        "providerOptions": {"anthropic": {}},
    }
    part = {"type": "text", "text": "Hello", "annotations": None, "id": None, **marks}
    assert one(role=role, content=[part], **marks) == {"role": role, "content": "Hello"}


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ({"audio": {"id": "audio_1"}}, "send its words as content"),
        ({"function_call": {"name": "f", "arguments": "{}"}}, "use tool_calls"),
        ({"prefix": True}, "continue_final_message"),
    ],
)
def test_fields_that_would_change_the_answer_are_refused_with_a_remedy(
    message: dict[str, Any], remedy: str
) -> None:
    assert remedy in refused({"role": "assistant", "content": "a", **message}).message


def test_a_tools_answer() -> None:
    made = one(role="tool", tool_call_id="call_a", content=[{"type": "text", "text": "11"}])
    assert made == {"role": "tool", "content": "11", "tool_call_id": "call_a"}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({}, "role"),
        ({"role": "king", "content": "hi"}, "role"),
        ({"role": "function", "content": "hi"}, "role"),
        ({"role": ["user"], "content": "hi"}, "role"),
        ({"role": "user"}, "content"),
        ({"role": "user", "content": None}, "content"),
        ({"role": "user", "content": 5}, "content"),
        ({"role": "tool", "content": {}}, "content"),
        ({"role": "tool", "content": [{"type": "tool_reference"}]}, "content[0].type"),
        ({"role": "user", "content": ["hi"]}, "content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": "", "x": 1}]}, "content[0].x"),
        ({"role": "user", "content": "hi", "prefix": True}, "prefix"),
        ({"role": "user", "content": "hi", "tool_calls": [CALL]}, "tool_calls"),
        ({"role": "user", "content": "hi", "name": 5}, "name"),
        ({"role": "assistant", "audio": {"id": "x"}}, "audio"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [5]}, "tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{}]}, "tool_calls[0].function"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]},
            "tool_calls[0].function.name",
        ),
    ],
)
def test_bad_messages_are_named_by_their_place(message: Any, param: str) -> None:
    assert refused(message).param == f"messages[0].{param}"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=12,
)
near_messages = st.dictionaries(
    st.sampled_from(["role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"])
    | st.text(max_size=5),
    st.sampled_from(["user", "assistant", "system", "tool"])
    | json_values
    | st.lists(st.just(CALL) | json_values, max_size=2),
)


@settings(deadline=None, max_examples=50)
@given(st.lists(near_messages, min_size=1, max_size=3))
def test_any_object_is_a_conversation_or_a_named_error(messages: list[dict[str, Any]]) -> None:
    try:
        made = read_messages(messages)
    except InvalidRequest as error:
        assert error.param is not None
        assert error.param.startswith("messages[")
    else:
        assert all(isinstance(message["content"], str) for message in made)


@settings(deadline=None, max_examples=50)
@given(json_values)
def test_any_json_is_read_as_it_was_written(value: Any) -> None:
    import json

    assert parse_json(json.dumps(value)) == value


def test_what_is_asked_is_not_kept() -> None:
    """The parser would keep the last 16 384 short strings of all requests."""
    before = sys.getallocatedblocks()
    for number in range(5_000):
        parse_json(f'{{"content": "{number}, which nobody else has asked"}}')
    assert sys.getallocatedblocks() - before < 1_000


@pytest.mark.parametrize("text", ["18446744073709551616", "-9223372036854775809", "[1e400]"])
def test_numbers_that_do_not_travel(text: str) -> None:
    with pytest.raises(ValueError, match=r"integer|number"):
        parse_json(text)


@pytest.mark.parametrize("text", ["18446744073709551615", "-9223372036854775808", '"1e999"'])
def test_numbers_that_do(text: str) -> None:
    parse_json(text)
