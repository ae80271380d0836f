"""Conversations that made other servers fail. docs/reported-faults.md lists the ids in test
names."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from support.api_client import (
    CHAT,
    PATHS,
    TEXT,
    Json,
    answer,
    choice,
    fields_of,
    function,
    refused,
    tokenizer_of,
    user,
    whole_stream,
)
from support.models.tokenizer import PAD, TEMPLATES
from support.server import Server

SUM = function("sum", x="integer", y="integer")
LEFT_OUT = object()


def history(content: Any = None, arguments: str = '{"x":7,"y":4}') -> list[Json]:
    """A question, a call, and its result."""
    call = {"name": "sum", "arguments": arguments}
    asked: Json = {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "call_a", "type": "function", "function": call}],
    }
    if content is LEFT_OUT:
        del asked["content"]
    result = {"role": "tool", "tool_call_id": "call_a", "content": "11"}
    return [user("add 7 and 4"), asked, result]


def prompt_tokens(server: Server, *messages: Json, **fields: Any) -> int:
    used: Json = answer(server, CHAT, messages=messages, **fields)["usage"]
    return int(used["prompt_tokens"])


@pytest.mark.parametrize("content", [None, LEFT_OUT, "", []])
def test_R01_R02_content_beside_tool_calls_may_be_missing(tiny: Server, content: Any) -> None:
    asked: Json = {"messages": history(content), "tools": [SUM]}
    whole = answer(tiny, CHAT, **asked)
    assert whole["choices"][0]["message"]["content"]
    assert whole["usage"]["prompt_tokens"] == prompt_tokens(tiny, *history(""), tools=[SUM])
    streamed = whole_stream(tiny, CHAT, **asked, stream_options={"include_usage": True})
    assert streamed.text() == whole["choices"][0]["message"]["content"]
    assert streamed.usage is not None
    assert streamed.usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]


@pytest.mark.parametrize("content", [None, LEFT_OUT])
def test_R02_no_parameters_and_no_parallel_calls(tiny: Server, content: Any) -> None:
    streamed = whole_stream(
        tiny,
        CHAT,
        messages=history(content, "{}"),
        tools=[{"type": "function", "function": {"name": "sum"}}],
        parallel_tool_calls=False,
        stream_options={"include_usage": True},
    )
    assert streamed.text()
    assert streamed.usage is not None


def test_R04_templates_get_arguments_as_a_mapping(tiny: Server, script: Server) -> None:
    """A random model goes on from the ids of a prompt that was rendered here as from the chat."""
    parsed = history("")
    parsed[1]["tool_calls"][0]["function"]["arguments"] = {"x": 7, "y": 4}
    renderer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(tiny))
    ids = renderer.apply_chat_template(
        parsed,
        tools=[SUM],
        chat_template=TEMPLATES["tools"],
        add_generation_prompt=True,
        return_dict=False,
    )
    asked = answer(tiny, CHAT, messages=history(), tools=[SUM])
    assert asked["usage"]["prompt_tokens"] == len(ids)
    raw = choice(tiny, TEXT, prompt=ids)
    assert asked["choices"][0]["message"]["content"] == raw["text"]
    seen = choice(script, CHAT, messages=history(), tools=[SUM], max_tokens=20)
    assert seen["text"] == "I see seven and four."


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("arguments", ['{"x": 7,', "7", "[1]", "null", "NaN", '"text"', "{'x': 7}"])
def test_R05_arguments_that_are_no_object(tiny: Server, arguments: str, streamed: bool) -> None:
    kept = json.dumps({"unreadable_arguments": arguments})
    found, wanted = (history(arguments=text) for text in (arguments, kept))
    asked = {"tools": [SUM], "stream": streamed, "max_tokens": 4}
    response = tiny.post(CHAT, {"messages": found, **asked})
    assert response.status_code == 200, response.text
    assert prompt_tokens(tiny, *found, tools=[SUM]) == prompt_tokens(tiny, *wanted, tools=[SUM])


@pytest.mark.parametrize("arguments", ["", " "])
def test_R05_empty_arguments_are_none(tiny: Server, arguments: str) -> None:
    found = prompt_tokens(tiny, *history(arguments=arguments), tools=[SUM])
    assert found == prompt_tokens(tiny, *history(arguments="{}"), tools=[SUM])


def test_R15_text_parts_are_joined_in_order(tiny: Server, script: Server) -> None:
    parts = [{"type": "text", "text": text} for text in ("first piece. ", "second piece.")]
    for role in ("user", "system", "developer", "tool"):
        apart, joined = (
            [{"role": role, "content": content}]
            for content in (parts, "first piece. second piece.")
        )
        found, wanted = answer(tiny, CHAT, messages=apart), answer(tiny, CHAT, messages=joined)
        assert found["usage"]["prompt_tokens"] == wanted["usage"]["prompt_tokens"]
        assert found["choices"] == wanted["choices"]
    assert choice(script, CHAT, messages=[user(parts)])["text"] == "Both pieces."


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "file", "file": {"file_id": "f"}},
        {"type": "banana"},
    ],
    ids=lambda part: str(part["type"]),
)
def test_R17_parts_that_are_not_text(tiny: Server, part: Json, streamed: bool) -> None:
    asked = [user([{"type": "text", "text": "what is shown?"}, part])]
    response = tiny.post(CHAT, {"messages": asked, "stream": streamed})
    assert part["type"] in refused(response, "messages[0].content[1].type")["message"]


@pytest.mark.parametrize("part", [{}, {"type": None}, {"text": "what?"}, "what?", None, 5, []])
def test_R17_parts_that_are_none(tiny: Server, part: Any) -> None:
    response = tiny.post(CHAT, {"messages": [user([part])]})
    assert response.json()["error"]["param"].startswith("messages[0].content[0]")
    assert response.status_code == 400


def test_R18_developers_are_not_left_out(tiny: Server) -> None:
    rule = "answer only KIWI"
    as_developer, as_system = (
        answer(tiny, CHAT, messages=[{"role": role, "content": rule}, user("hello")])
        for role in ("developer", "system")
    )
    assert as_developer["usage"]["prompt_tokens"] == as_system["usage"]["prompt_tokens"]
    assert as_developer["choices"] == as_system["choices"]
    assert as_system["usage"]["prompt_tokens"] > prompt_tokens(tiny, user("hello"))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("roles", [["assistant"], ["assistant", "user"]])
def test_R20_a_templates_own_words_reach_the_client(
    fussy: Server, roles: list[str], streamed: bool
) -> None:
    messages = [{"role": role, "content": "hi"} for role in roles]
    response = fussy.post(CHAT, {"messages": messages, "stream": streamed})
    assert "roles must alternate" in refused(response, "messages")["message"]


def test_N03_N04_a_template_without_system_messages_reads_them_all(fussy: Server) -> None:
    roles = {"Be A.": "system", "Be B.": "developer", "hi": "user", "Be C.": "system"}
    apart = [{"role": role, "content": said} for said, role in roles.items()]
    found = prompt_tokens(fussy, *apart)
    assert found == prompt_tokens(fussy, user("\n\n".join(roles)))


@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
def test_R20_histories_without_a_question_are_the_templates_affair(tiny: Server, role: str) -> None:
    assert choice(tiny, CHAT, messages=[{"role": role, "content": "hi"}])["text"]


@pytest.mark.parametrize("streamed", [False, True])
def test_R21_no_messages(tiny: Server, streamed: bool) -> None:
    response = tiny.post(CHAT, {"model": tiny.model, "messages": [], "stream": streamed})
    assert refused(response, "messages")["code"] == "empty_array"


@pytest.mark.parametrize("path", PATHS)
def test_R23_null_is_the_default(fussy: Server, path: str) -> None:
    """Every optional field may be null, as the server's own description lists them."""
    names = fields_of(fussy, path).keys() - {"messages", "prompt"}
    assert {"model", "temperature", "top_p", "stop", "n", "seed", "logit_bias", "user"} < names
    given: Json = {"messages": [user("[text]")]} if path == CHAT else {"prompt": f"hi{PAD}"}
    for nulls in (names, *({name} for name in names)):
        response = fussy.post(path, given | dict.fromkeys(nulls))
        assert response.status_code == 200, (nulls, response.text)


def test_R23_a_null_among_the_needed_is_refused(tiny: Server) -> None:
    refused(tiny.post(CHAT, {"messages": None}), "messages")
    refused(tiny.post(TEXT, {"prompt": None}), "prompt")
