"""Parts of agents' requests to Anthropic's messages API beside text: pictures, tools of other
servers, marks and metadata. docs/reported-faults.md lists the ids in test names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.lib.threads import _thread_state

from mayfly_protocol.requests import ChatPrompt
from mayfly_protocol.serving import Rejected, Submit
from support import front_client as harness
from support.doubles.fake_node import FakeNode
from support.front_client import following
from support.running_front import RunningFront

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TOOL = {"name": "sum", "description": "Adds.", "input_schema": {"type": "object"}}
PNG = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
IMAGE = {"type": "image", "source": PNG, "cache_control": {"type": "ephemeral"}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}}
NOTE = "[image left out: this model reads text only]"


def text(said: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **fields}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def body(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"max_tokens": 10, "messages": list(messages) or [user("hi")], **fields}


def prompt_of(front: RunningFront, node: FakeNode, asked: dict[str, Any]) -> ChatPrompt:
    return harness.prompt_of(front, node, PATH, asked)


def refused(front: RunningFront, asked: dict[str, Any]) -> str:
    found = [front.client.post(path, json=asked).json()["error"] for path in (PATH, COUNT)]
    assert found[0] == found[1]
    assert found[0]["type"] == "invalid_request_error"
    return str(found[0]["message"])


def result(*content: Any, **fields: Any) -> list[dict[str, Any]]:
    """A question, a call, and its result."""
    call = {"type": "tool_use", "id": "t", "name": "sum", "input": {}}
    returned = {"type": "tool_result", "tool_use_id": "t", "content": list(content), **fields}
    return [user("hi"), {"role": "assistant", "content": [call]}, user([returned])]


# Pictures and documents


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        ([IMAGE], NOTE),
        ([text("a.png:"), IMAGE, text("end")], f"a.png:\n{NOTE}\nend"),
        ([PDF], "[document left out: this model reads text only]"),
        ([{"type": "document", "source": {"type": "text", "data": "Dear"}}], "Dear"),
        (
            [{"type": "document", "source": {"type": "content", "content": [IMAGE]}}],
            f"\n{NOTE}\n",
        ),
        ([text("a"), text("b")], "ab"),
        (
            [
                {
                    "type": "search_result",
                    "title": "T",
                    "source": "file:a",
                    "content": [text("found")],
                    "citations": {"enabled": False},
                }
            ],
            "T\nfile:a\n\nfound",
        ),
    ],
)
def test_N05_a_picture_in_a_tools_result_becomes_a_note(
    front: RunningFront, node: FakeNode, content: list[Any], seen: str
) -> None:
    prompt = prompt_of(front, node, body(*result(*content)))
    assert prompt.messages[-1] == {"role": "tool", "tool_call_id": "t", "content": seen}


@pytest.mark.parametrize(
    "block",
    [IMAGE, PDF, {"type": "document", "source": {"type": "content", "content": [IMAGE]}}],
)
def test_N05_a_users_own_picture_is_refused_in_a_sentence(
    front: RunningFront, block: dict[str, Any]
) -> None:
    message = refused(front, body(user([text("what is this?"), block])))
    kind = block["type"]
    assert message.startswith(f"messages.0.content.1: This model does not support {kind} input")
    assert refused(front, body({"role": "assistant", "content": [IMAGE]})) == (
        "messages.0.content.0: A image block belongs in a message of role user."
    )


def test_a_users_own_text_document_is_read(front: RunningFront, node: FakeNode) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "Dear all."}
    letter = {"type": "document", "title": "Letter", "source": source, "citations": None}
    [message] = prompt_of(front, node, body(user([letter, text("Shorten it.")]))).messages
    assert message["content"] == "Letter\n\nDear all.\n\nShorten it."
    asked = body(user([letter | {"citations": {"enabled": True}}]))
    assert refused(front, asked).startswith("messages.0.content.0.citations.enabled: ")


# Threads


def test_N06_threads_are_refused_with_the_details_that_sdks_know(front: RunningFront) -> None:
    client = anthropic.Anthropic(base_url=str(front.client.base_url), api_key="none", max_retries=0)
    with client, pytest.raises(anthropic.BadRequestError) as raised:
        client.beta.messages.create(
            model="tiny",
            max_tokens=5,
            messages=[{"role": "user", "content": "hi"}],
            thread={"type": "create"},
            betas=["message-threads-2026-08-12"],
        )
    assert raised.value.body["error"]["details"] == {  # type: ignore[index]
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }
    assert _thread_state._unsupported_features(raised.value) == ["thread"]
    for thread in (None, {}):
        assert front.client.post(PATH, json=body(thread=thread)).status_code == 200


def test_N06_the_sdks_tool_runner_goes_on_without_a_thread(
    front: RunningFront, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="anthropic")
    with anthropic.Anthropic(
        base_url=str(front.client.base_url), api_key="none", max_retries=0
    ) as client:
        runner = client.beta.messages.tool_runner(
            model="tiny", max_tokens=5, messages=[{"role": "user", "content": "hi"}], tools=[]
        )
        assert runner.until_done().content[0].type == "text"
    assert "continuing without a thread: unsupported=thread" in caplog.text


# Hints, nulls and declarations

HINTS: list[dict[str, Any]] = [
    {"cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}},
    {"speed": "fast"},
    {"service_tier": "priority"},
    {"metadata": {"user_id": "u", "session": {"id": 5}}},
    {"diagnostics": {"previous_message_id": None}},
    {"fallbacks": "default"},
    {"fallbacks": [{"model": "m"}]},
    {"billing_policy": {"type": "billing_policy", "bill_to": "self"}},
    {"container": {"id": None, "skills": []}},
    {"mcp_servers": []},
    {"tools": []},
    {"system": ""},
    {"system": []},
    {"stop_sequences": []},
    {"thinking": {"type": "adaptive", "display": "updates", "block_binding": {}}},
    {"output_config": {"effort": None, "task_budget": {"type": "tokens", "total": 5}}},
    {"context_management": None},
    {"context_management": {"edits": []}},
    {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    {
        "context_management": {
            "edits": [
                {
                    "type": "clear_tool_uses_20250919",
                    "trigger": {"type": "input_tokens", "value": 9},
                }
            ]
        }
    },
]


@pytest.mark.parametrize("fields", HINTS, ids=lambda fields: str(*fields))
def test_N07_N08_what_asks_for_nothing_is_taken(front: RunningFront, fields: Any) -> None:
    response = front.client.post(PATH, json=body(**fields), headers={"anthropic-beta": "x-2026"})
    assert response.status_code == 200, response.text
    assert "mayfly-ignored" not in response.headers


def test_N08_marks_and_leftovers_within_messages(front: RunningFront, node: FakeNode) -> None:
    mark = {"cache_control": {"type": "ephemeral", "scope": "global"}}
    cited = {"citations": [{"type": "char_location", "cited_text": "x"}]}
    prompt = prompt_of(
        front,
        node,
        body(
            user([text("hi", **mark)]),
            {
                "role": "assistant",
                "content": [
                    {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}},
                    {"type": "thinking", "thinking": "Hm", "signature": "EqQB"},
                    text("yes", **cited),
                    {
                        "type": "tool_use",
                        "id": "t",
                        "name": "sum",
                        "input": None,
                        "caller": {"type": "direct"},
                        "toolset_name": None,
                        **mark,
                    },
                ],
            },
            user([{"type": "tool_result", "tool_use_id": "t", "content": None, **mark}]),
            {"role": "assistant", "content": None},
            user("so?"),
            system=[text("A.", **mark)],
            tools=[TOOL | mark | {"eager_input_streaming": True, "allowed_callers": ["direct"]}],
        ),
    )
    assert [message["content"] for message in prompt.messages] == ["A.", "hi", "yes", "", "", "so?"]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"container": {"id": "c"}}, "container: This server runs no code"),
        ({"mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}]}, "mcp_servers: "),
        ({"inference_geo": "eu"}, "inference_geo: "),
    ],
)
def test_what_would_change_the_answer_is_refused(
    front: RunningFront, fields: dict[str, Any], problem: str
) -> None:
    message = front.client.post(PATH, json=body(**fields)).json()["error"]["message"]
    assert message.startswith(problem)


def test_summaries_are_the_clients_affair(front: RunningFront) -> None:
    edit = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 50_000}}
    message = refused(front, body(context_management={"edits": [edit]}))
    assert message.startswith("context_management.edits.0: This server summarizes no")
    asked = body(compaction={"type": "summarize"})
    error = front.client.post(PATH, json=asked).json()["error"]
    assert error["message"].startswith("compaction: This server summarizes no conversations")
    assert front.client.post(COUNT, json=asked).status_code == 200


def test_unknown_fields_within_objects_in_anthropics_words(front: RunningFront) -> None:
    message = refused(front, body(user([text("hi", banana=1)])))
    assert message == "messages.0.content.0.banana: Extra inputs are not permitted."


# Tools


def names(prompt: ChatPrompt) -> list[str]:
    return [tool["function"]["name"] for tool in prompt.tools]


SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
BASH = {"type": "bash_20250124", "name": "bash"}
HOSTED = [
    SEARCH,
    {"type": "web_fetch_20260318", "name": "web_fetch"},
    {"type": "code_execution_20260521", "name": "code_execution"},
    {"type": "tool_search_tool_regex", "name": "tool_search_tool_regex"},
    {"type": "mcp_toolset", "mcp_server_name": "x"},
]


@pytest.mark.parametrize("tool", HOSTED, ids=lambda tool: str(tool["type"]))
def test_tools_of_anthropics_server_are_declarations_only(
    front: RunningFront, node: FakeNode, tool: dict[str, Any]
) -> None:
    for choice in (None, {"type": "auto"}, {"type": "any"}, {"type": "none"}):
        asked = body(tools=[tool, TOOL], tool_choice=choice)
        assert names(prompt_of(front, node, asked)) == ["sum"]
    assert not prompt_of(front, node, body(tools=[tool], tool_choice={"type": "none"})).tools
    name = tool.get("name", "x")
    for alone in (body(tools=[tool]), body(tools=[tool], tool_choice={"type": "any"})):
        assert refused(front, alone).startswith(f"tools.0.type: {tool['type']} is a tool that")
    forced = refused(front, body(tools=[TOOL, tool], tool_choice={"type": "tool", "name": name}))
    assert forced.startswith((f"tools.1.type: {tool['type']}", "tool_choice.name: "))


@pytest.mark.parametrize(
    "kind", ["bash_20250124", "text_editor_20250728", "computer_20251124", "memory_20250818"]
)
def test_tools_with_a_schema_of_anthropics_are_named(front: RunningFront, kind: str) -> None:
    message = refused(front, body(tools=[TOOL, {"type": kind, "name": "x"}]))
    assert message.startswith(f"tools.1.type: {kind} has a schema that only Anthropic's models")
    assert "input_schema" in message
    assert "secret" not in refused(front, body(tools=[{"type": "secret", "name": "x"}]))


def test_a_schema_makes_any_type_the_clients_own(front: RunningFront, node: FakeNode) -> None:
    asked = body(tools=[BASH | {"input_schema": {"type": "object"}}])
    assert names(prompt_of(front, node, asked)) == ["bash"]


def test_deferred_tools_are_loaded_by_a_reference(front: RunningFront, node: FakeNode) -> None:
    late = TOOL | {"name": "late", "defer_loading": True}
    tools = [TOOL | {"defer_loading": False}, late, late | {"name": "never"}]
    assert names(prompt_of(front, node, body(tools=tools))) == ["sum"]
    found = result({"type": "tool_reference", "tool_name": "late"})
    prompt = prompt_of(front, node, body(*found, tools=tools))
    assert names(prompt) == ["sum", "late"]
    assert prompt.messages[-1]["content"] == "The tool late can be called now."
    called = {"type": "tool_use", "id": "t", "name": "late", "input": {}}
    history = [user("hi"), {"role": "assistant", "content": [called]}, user("so?")]
    assert names(prompt_of(front, node, body(*history, tools=tools))) == ["sum", "late"]
    forced = body(tools=tools, tool_choice={"type": "tool", "name": "late"})
    assert names(prompt_of(front, node, forced)) == ["sum", "late"]


def test_deferred_tools_that_nothing_here_could_find_are_all_loaded(
    front: RunningFront, node: FakeNode
) -> None:
    late = [TOOL | {"name": name, "defer_loading": True} for name in ("a", "b")]
    hosted = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
    for tools in (late, [hosted, *late], [hosted, *late, TOOL]):
        assert names(prompt_of(front, node, body(tools=tools)))[:2] == ["a", "b"]


def test_tools_come_and_go_in_mid_conversation(front: RunningFront, node: FakeNode) -> None:
    late = TOOL | {"name": "late", "defer_loading": True}
    new = {"type": "tool_definition", "definition": TOOL | {"name": "new"}}

    def system(*content: dict[str, Any]) -> dict[str, Any]:
        return {"role": "system", "content": list(content)}

    def change(kind: str, tool: str | dict[str, Any]) -> dict[str, Any]:
        named = {"type": "tool_reference", "name": tool} if isinstance(tool, str) else tool
        return {"type": f"tool_{kind}", "tool": named, "cache_control": {"type": "ephemeral"}}

    messages = [
        user("hi"),
        system(text("B."), change("addition", "late"), change("addition", new)),
        user("so?"),
        system(change("removal", "sum")),
    ]
    for end, offered in ((1, ["sum"]), (3, ["sum", "late", "new"]), (4, ["late", "new"])):
        prompt = prompt_of(front, node, body(*messages[:end], tools=[TOOL, late]))
        assert names(prompt) == offered
    assert [message["content"] for message in prompt.messages] == [
        "hi",
        "B.\nThe tool late can be called now.\nThe tool new can be called now.",
        "so?",
        "The tool sum can no longer be called.",
    ]
    hosted = change("addition", {"type": "tool_definition", "definition": SEARCH})
    assert names(prompt_of(front, node, body(user("hi"), system(hosted), tools=[TOOL]))) == ["sum"]
    wrong = change("addition", {"type": "tool_definition", "definition": BASH})
    assert refused(front, body(user("hi"), system(wrong))).startswith(
        "messages.1.content.0.tool.definition.type: bash_20250124 has a schema"
    )
    assert refused(front, body(user([change("removal", "sum")]))) == (
        "messages.0.content.0: A tool_removal block belongs in a message of role system."
    )


def test_tools_that_only_code_may_call_are_left_out(front: RunningFront, node: FakeNode) -> None:
    coded = TOOL | {"name": "coded", "allowed_callers": ["code_execution_20260120"]}
    assert names(prompt_of(front, node, body(tools=[coded, TOOL]))) == ["sum"]


def test_examples_of_a_tools_input_are_part_of_its_description(
    front: RunningFront, node: FakeNode
) -> None:
    [tool] = prompt_of(front, node, body(tools=[TOOL | {"input_examples": [{"x": 1}]}])).tools
    assert tool["function"]["description"] == 'Adds.\n\nExamples of its input:\n{"x": 1}'


# System messages


def billing(cch: str, version: str = "2.1.332.01c") -> str:
    return f"x-anthropic-billing-header: cc_version={version}; cc_entrypoint=cli; cch={cch};"


def test_N09_billing_lines_are_no_part_of_the_prompt(front: RunningFront, node: FakeNode) -> None:
    keys = set()
    for system in (
        [text(billing("36ee5")), text("You are brief.")],
        [text(billing("0aaa9", "2.2.0.fff")), text("You are brief.")],
        [text(f"{billing('1')}\nx-anthropic-other: a\nYou are brief.")],
        f"{billing('2')}\nYou are brief.",
        "You are brief.",
    ):
        prompt = prompt_of(front, node, body(system=system))
        assert prompt.messages[0] == {"role": "system", "content": "You are brief."}
        keys.add(str(prompt.messages))
    assert len(keys) == 1
    [message] = prompt_of(front, node, body(system=[text(billing("1"))])).messages
    assert message == {"role": "user", "content": "hi"}
    quoted = f"Never repeat this:\n{billing('1')}"
    assert prompt_of(front, node, body(system=quoted)).messages[0]["content"] == quoted
    assert prompt_of(front, node, body(user(billing("1")))).messages[0]["content"] == billing("1")


def test_a_system_message_may_be_meant_for_one_turn(front: RunningFront, node: FakeNode) -> None:
    passing = {"role": "system", "content": "B.", "clear_at": "next_user_message"}
    prompt = prompt_of(front, node, body(user("hi"), passing))
    assert prompt.messages[1] == {"role": "system", "content": "B."}
    prompt = prompt_of(front, node, body(user("hi"), passing, user("so?")))
    assert [message["content"] for message in prompt.messages] == ["hi", "so?"]
    lasting = passing | {"clear_at": "never", "output_config": {"effort": "low"}}
    prompt = prompt_of(front, node, body(user("hi"), lasting, user("so?")))
    assert [message["content"] for message in prompt.messages] == ["hi", "B.", "so?"]


# A full context


def test_N25_a_prompt_too_long_in_the_words_that_agents_look_for() -> None:
    def too_long(submit: Submit) -> Iterator[Any]:
        yield Rejected(
            submit.rid,
            submit.attempt,
            "invalid",
            "too long",
            "messages",
            "context_length_exceeded",
            prompt_tokens=215_000,
            context=200_000,
        )

    with following(too_long) as front:
        for stream in (False, True):
            response = front.client.post(PATH, json=body(stream=stream))
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert error["message"] == "prompt is too long: 215000 tokens > 200000 maximum"
            assert error["details"] == {"error_code": "context_length_exceeded"}
