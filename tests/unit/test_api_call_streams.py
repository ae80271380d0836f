"""Tool calls in the streams of all three APIs: arguments piece by piece, what is left unfinished,
and signs of life while a worker holds text back."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from mayfly_protocol.requests import ChatPrompt, FinishReason
from mayfly_protocol.serving import Submit, ToolCallDelta
from support.doubles.fake_node import AnswerScript, ScriptStep, accept, finish, step
from support.front_client import CHAT, HELLO, following, named_events

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: HELLO,
    RESPONSES: {"input": "hi"},
    MESSAGES: HELLO | {"max_tokens": 9},
}
BEGUN = (ToolCallDelta(0, '{"path": "', "c1", "write"),)
MORE = (ToolCallDelta(0, "/tmp"),)
UNFINISHED = (ToolCallDelta(0, "", unfinished=True),)


def ending(reason: FinishReason, stop: str | None = None) -> AnswerScript:
    """Script of a call that the answer leaves unfinished."""

    def script(submit: Submit) -> Iterator[ScriptStep]:
        yield accept(submit)
        yield step(submit, 0, "", tool_calls=BEGUN)
        yield step(submit, 1, "", tool_calls=MORE)
        yield step(submit, 2, "", tool_calls=UNFINISHED, finish=reason, stop=stop)
        yield finish(submit, 3)

    return script


def whole(submit: Submit) -> Iterator[ScriptStep]:
    """Script of a call, and of a text once it was made."""
    prompt = submit.generation.prompt
    yield accept(submit)
    if isinstance(prompt, ChatPrompt) and len(prompt.messages) > 1:
        yield step(submit, 0, "Done.", finish="stop")
    else:
        yield step(submit, 0, "", tool_calls=BEGUN)
        yield step(submit, 1, "", tool_calls=MORE)
        yield step(submit, 2, "", tool_calls=(ToolCallDelta(0, '"}'),), finish="tool_calls")
    yield finish(submit, 3)


def events_of(path: str, response: httpx.Response) -> list[dict[str, Any]]:
    if path != CHAT:
        return named_events(response)
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    return [json.loads(line) for line in data if line.startswith("{")]


def streamed(path: str, script: AnswerScript) -> tuple[str, list[dict[str, Any]]]:
    with following(script) as front:
        response = front.client.post(path, json=ASKED[path] | {"stream": True})
        return response.text, events_of(path, response)


def arguments(events: list[dict[str, Any]]) -> list[str]:
    """The pieces of the arguments, in any of the APIs."""
    found = []
    for event in events:
        if event.get("type") == "response.function_call_arguments.delta":
            found.append(event["delta"])
        elif event.get("type") == "content_block_delta":
            found.append(event["delta"].get("partial_json"))
        for choice in event.get("choices", []):
            calls = choice["delta"].get("tool_calls", [])
            found += [call["function"]["arguments"] for call in calls]
    return found


@pytest.mark.parametrize("path", ASKED)
def test_a_stream_asks_the_worker_for_pieces(path: str) -> None:
    seen: list[Submit] = []

    def script(submit: Submit) -> Iterator[ScriptStep]:
        seen.append(submit)
        return ending("length")(submit)

    with following(script) as front:
        for stream in (False, True):
            front.client.post(path, json=ASKED[path] | {"stream": stream})
    assert [submit.generation.output.early_calls for submit in seen] == [False, True]


@pytest.mark.parametrize(("reason", "stop"), [("length", None), ("stop", "END")])
@pytest.mark.parametrize("path", ASKED)
def test_a_call_that_is_cut_off_is_never_said_to_be_done(
    path: str, reason: FinishReason, stop: str | None
) -> None:
    text, events = streamed(path, ending(reason, stop))
    assert arguments(events) == ['{"path": "', "/tmp"]
    assert "error" not in {event.get("type") for event in events}
    if path == CHAT:
        assert [c["finish_reason"] for event in events for c in event["choices"]][-1] == reason
        assert text.endswith("data: [DONE]\n\n")
    elif path == RESPONSES:
        assert not [event for event in events if event["type"].endswith(".done")]
        assert events[-1]["type"] == "response.incomplete"
        [item] = events[-1]["response"]["output"]
        assert (item["status"], item["arguments"]) == ("incomplete", '{"path": "/tmp')
    else:
        assert "content_block_stop" not in text
        stopped = {"length": "max_tokens", "stop": "stop_sequence"}[reason]
        assert events[-2]["delta"] == {"stop_reason": stopped, "stop_sequence": stop}


@pytest.mark.parametrize("path", ASKED)
def test_R07_a_call_that_cannot_be_read_is_an_error(path: str) -> None:
    """After its beginning was sent. Some clients would make it with what they have."""
    text, events = streamed(path, ending("stop"))
    assert arguments(events) == ['{"path": "', "/tmp"]
    assert "[DONE]" not in text and "cannot be read" in text
    if path == CHAT:
        assert events[-1]["error"]["code"] == "unreadable_tool_call"
        assert events[-1]["error"]["retryable"] is True
        assert all(c["finish_reason"] is None for e in events[:-1] for c in e["choices"])
    elif path == RESPONSES:
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["output"][0]["status"] == "incomplete"
        assert not [event for event in events if event["type"].endswith(".done")]
    else:
        assert events[-1]["type"] == "error"
        assert not {"content_block_stop", "message_delta"} & {event["type"] for event in events}


def test_SDKs_raise_for_a_call_that_cannot_be_read() -> None:
    with (
        following(ending("stop")) as front,
        openai.OpenAI(base_url=f"{front.url}/v1", api_key="-", max_retries=0) as chat,
        anthropic.Anthropic(base_url=front.url, api_key="-", max_retries=0) as messages,
    ):
        with pytest.raises(openai.APIError, match="cannot be read"):
            for _ in chat.chat.completions.create(
                model="tiny", messages=HELLO["messages"], stream=True
            ):
                pass
        with (
            messages.messages.stream(**ASKED[MESSAGES], model="tiny") as stream,
            pytest.raises(anthropic.APIError, match="cannot be read"),
        ):
            stream.get_final_message()


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    ("script", "made"), [(whole, 1), (ending("length"), 0), (ending("stop", "END"), 0)]
)
def test_a_tool_runner_makes_whole_calls_alone(
    script: AnswerScript, made: int, eager: bool
) -> None:
    """Although the SDK reads unfinished JSON as if it had ended."""
    calls: list[str] = []

    @anthropic.beta_tool
    def write(path: str) -> str:
        """Writes a file."""
        calls.append(path)
        return "done"

    with (
        following(script) as front,
        anthropic.Anthropic(base_url=front.url, api_key="-", max_retries=0) as client,
    ):
        runner = client.beta.messages.tool_runner(
            thread=False,
            stream=True,
            run_tools_eagerly=eager,
            tools=[write],
            model="tiny",
            max_tokens=9,
            messages=[{"role": "user", "content": "hi"}],
        )
        for turn in runner:
            turn.get_final_message()
    assert calls == ["/tmp"] * made


def test_the_end_of_a_call_comes_before_the_text_behind_it() -> None:
    """Both may be in one delta."""

    def script(submit: Submit) -> Iterator[ScriptStep]:
        yield accept(submit)
        yield step(submit, 0, "", tool_calls=BEGUN)
        last = (ToolCallDelta(0, '"}'), ToolCallDelta(1, "{}", "c2", "glob"))
        yield step(submit, 1, "text", tool_calls=last, finish="tool_calls")
        yield finish(submit, 2)

    _, events = streamed(MESSAGES, script)
    blocks = [event["content_block"] for event in events if "content_block" in event]
    assert [block["type"] for block in blocks] == ["tool_use", "text", "tool_use"]
    assert arguments(events) == ['{"path": "', '"}', None, "{}"]
    assert [event["index"] for event in events if "delta" in event and "index" in event] == [
        0,
        0,
        1,
        2,
    ]
    _, events = streamed(RESPONSES, script)
    output = events[-1]["response"]["output"]
    assert [item.get("arguments") for item in output] == ['{"path": ""}', None, "{}"]
    assert output[1]["content"][0]["text"] == "text"


@pytest.mark.parametrize(
    ("path", "sign"), [(CHAT, ":"), (RESPONSES, ":"), (MESSAGES, "event: ping")]
)
def test_N26_held_back_text_is_no_silence(path: str, sign: str) -> None:
    """Tokens come, and nothing can be said yet: an argument that is no text is sent once it is
    whole."""
    seen = threading.Event()

    def script(submit: Submit) -> Iterator[ScriptStep]:
        yield accept(submit)
        yield step(submit, 0, "", tool_calls=BEGUN)
        at = 1
        while not seen.wait(0.1) and at < 300:
            yield step(submit, at, "")
            at += 1
        last = (ToolCallDelta(0, '"}'),)
        yield step(submit, at, "", tool_calls=last, finish="tool_calls")
        yield finish(submit, at + 1)

    asked = ASKED[path] | {"stream": True}
    with following(script) as front, front.client.stream("POST", path, json=asked) as response:
        for line in response.iter_lines():
            if line.startswith(sign):
                seen.set()
    assert seen.is_set()
