"""Tool calls and thoughts of each family, from the tokens of a model to the answers of all APIs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from mayfly_protocol.serving import Submit, Tokens
from mayfly_worker.engine.sequence import Logprobs, SampledToken
from mayfly_worker.prepare import Choice, PreparedRequest
from mayfly_worker.request_state import RequestState
from mayfly_worker.text.choice import ChoiceText
from mayfly_worker.text.detokenize import TokenTexts
from mayfly_worker.text.prompts import RenderedPrompt, render
from support import vocabularies
from support.call_samples import SAMPLES, THOUGHT_SAMPLES, TOOLS, Calls, Sample
from support.doubles.fake_node import ScriptStep, accept, finish
from support.front_client import CHAT, HELLO, following, named_events

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
FUNCTIONS = [tool["function"] for tool in TOOLS]
ASKED: dict[str, dict[str, Any]] = {
    CHAT: HELLO | {"tools": list(TOOLS)},
    RESPONSES: {"input": "hi", "tools": [{"type": "function", **each} for each in FUNCTIONS]},
    MESSAGES: HELLO
    | {
        "max_tokens": 99,
        "tools": [{"name": each["name"], "input_schema": each["parameters"]} for each in FUNCTIONS],
    },
}
ONE_EACH = {sample.dialect: sample for sample in SAMPLES}
ONE_THOUGHT_EACH = {(one.thought, bool(one.calls)): one for one in reversed(THOUGHT_SAMPLES)}


class Model:
    """Writes one sample's text, token by token, through the worker's text handling."""

    sample: Sample

    def __call__(self, submit: Submit) -> Iterator[ScriptStep]:
        sample = self.sample
        tokenizer = vocabularies.with_parser(
            sample.dialect, thought=sample.thought, in_prompt=sample.in_prompt
        )
        rendered = render(submit.generation.prompt, tokenizer, 10**6)
        ids = [*vocabularies.ids_of(sample.text, tokenizer), tokenizer.eos_token_id]
        yield from spoken(submit, tokenizer, rendered, ids)


def spoken(
    submit: Submit, tokenizer: Any, rendered: RenderedPrompt, ids: list[int]
) -> Iterator[ScriptStep]:
    """Writes tokens as a worker does, with the log probability of each."""
    generation = submit.generation
    choice = ChoiceText(generation, tokenizer, rendered, rid=submit.rid, choice=0)
    sequence: Any = SimpleNamespace(id=0, max_tokens=99)
    state = RequestState(b"", submit, "key")
    state.accept(PreparedRequest(submit, 1, (), [Choice(0, sequence, choice)]))
    texts = TokenTexts(tokenizer)
    yield accept(submit)
    for id in ids:
        logprobs = Logprobs(-0.5, (), ()) if generation.output.logprobs is not None else None
        end = "stop" if id in tokenizer.eos_token_ids else None
        delta, _ = state.add_token(SampledToken(0, id, end, logprobs), texts)  # type: ignore[arg-type]
        if delta is not None:
            yield Tokens((delta,))
    yield finish(submit, len(ids))


def answered(path: str, response: httpx.Response) -> tuple[str, Calls, str]:
    """The content, the calls and the reason of the end."""
    body = response.json()
    if path == CHAT:
        [choice] = body["choices"]
        called = [call["function"] for call in choice["message"].get("tool_calls") or []]
        calls = [(call["name"], json.loads(call["arguments"])) for call in called]
        return choice["message"]["content"] or "", calls, choice["finish_reason"]
    if path == RESPONSES:
        items = body["output"]
        texts = [part["text"] for i in items if i["type"] == "message" for part in i["content"]]
        made = [item for item in items if item["type"] == "function_call"]
        calls = [(item["name"], json.loads(item["arguments"])) for item in made]
        return "".join(texts), calls, "tool_calls" if body["status"] == "completed" else ""
    blocks = body["content"]
    calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    return text, calls, {"tool_use": "tool_calls"}.get(body["stop_reason"], "")


def streamed(path: str, response: httpx.Response) -> tuple[str, Calls, str]:
    """The same, from the events of a stream."""
    text, names, arguments, end = "", [], {}, ""
    if path == CHAT:
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        for event in (json.loads(line) for line in lines if line.startswith("{")):
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                end = choice["finish_reason"] or end
                for call in choice["delta"].get("tool_calls", []):
                    if call["function"].get("name"):
                        names.append(call["function"]["name"])
                    at = call["index"]
                    arguments[at] = arguments.get(at, "") + call["function"]["arguments"]
    for event in named_events(response) if path != CHAT else []:
        delta = event.get("delta") or {}
        if event["type"] in ("response.output_item.added", "content_block_start"):
            item = event.get("item") or event["content_block"]
            if item["type"] in ("function_call", "tool_use"):
                names.append(item["name"])
                arguments[len(names)] = ""
        elif event["type"] == "response.output_text.delta":
            text += delta
        elif event["type"] == "response.function_call_arguments.delta":
            arguments[len(names)] += delta
        elif event["type"] == "content_block_delta":
            text += delta.get("text", "")
            if "partial_json" in delta:
                arguments[len(names)] += delta["partial_json"]
        elif event["type"] == "response.reasoning_text.delta":
            continue
        elif event["type"] == "response.completed" or delta.get("stop_reason") == "tool_use":
            end = "tool_calls"
    parsed = [json.loads(each or "{}") for each in arguments.values()]
    return text, list(zip(names, parsed, strict=True)), end


@pytest.mark.parametrize("path", ASKED)
def test_F02_calls_of_every_dialect_over_every_api(path: str) -> None:
    model = Model()
    with following(model) as front:
        for sample in ONE_EACH.values():
            model.sample = sample
            meant = (sample.content, sample.calls, "tool_calls")
            for stream in (False, True):
                response = front.client.post(path, json=ASKED[path] | {"stream": stream})
                found = (streamed if stream else answered)(path, response)
                assert found == meant, (sample, response.text)


# Thoughts beside answers

HARMONY = (
    "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>analysis"
    "<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Sunny.<|return|>"
)


def speak_harmony(submit: Submit) -> Iterator[ScriptStep]:
    """Writes HARMONY."""
    tokenizer = vocabularies.harmony()
    ids = vocabularies.ids_of(HARMONY, tokenizer)
    yield from spoken(submit, tokenizer, RenderedPrompt([0]), ids)


def test_F01_thoughts_and_answers_over_every_api() -> None:
    said = ("Let me see.\n\nSunny.", "Hm.")
    with following(speak_harmony) as front:
        for stream in (False, True):
            body = HELLO | {"stream": stream, "logprobs": True}
            response = front.client.post(CHAT, json=body)
            parts = [response.json()["choices"][0]] if not stream else chunks_of(response)
            messages = [part["message" if "message" in part else "delta"] for part in parts]
            content = "".join(message.get("content") or "" for message in messages)
            thought = "".join(message.get("reasoning_content") or "" for message in messages)
            assert (content, thought) == said
            tokens = [t for part in parts for t in (part["logprobs"] or {}).get("content") or ()]
            assert "".join(token["token"] for token in tokens) == "Let me see.Sunny."
        items = front.client.post(RESPONSES, json={"input": "hi"}).json()["output"]
        assert [item["type"] for item in items] == ["message", "reasoning", "message"]
        texts = [item["content"][0]["text"] for item in items]
        assert (texts[0] + texts[2], texts[1]) == said
        asked = HELLO | {"max_tokens": 99}
        blocks = front.client.post(MESSAGES, json=asked).json()["content"]
        assert {block["type"] for block in blocks} == {"thinking", "text"}
        texts = [block.get("text") or block["thinking"] for block in blocks]
        assert "".join(texts).replace(said[1], "") == said[0]
        for path, body in ((RESPONSES, {"input": "hi"}), (MESSAGES, asked)):
            events = named_events(front.client.post(path, json=body | {"stream": True}))
            deltas = [event["delta"] for event in events if "delta" in event]
            written = [
                d if isinstance(d, str) else d.get("text", d.get("thinking", "")) for d in deltas
            ]
            assert "".join(written) == "Let me see.Hm.\n\nSunny."


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    return [choice for event in events for choice in event["choices"]]


def thought_in(path: str, response: httpx.Response, *, stream: bool) -> str:
    """The thought of an answer, whole or streamed."""
    if stream and path == CHAT:
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        events = [json.loads(line) for line in lines if line.startswith("{")]
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        return "".join(delta.get("reasoning_content") or "" for delta in deltas)
    if stream:
        found = [
            event["delta"] if path == RESPONSES else event["delta"].get("thinking", "")
            for event in named_events(response)
            if event["type"] in ("response.reasoning_text.delta", "content_block_delta")
        ]
        return "".join(found)
    body = response.json()
    if path == CHAT:
        return body["choices"][0]["message"].get("reasoning_content") or ""
    if path == RESPONSES:
        items = [item for item in body["output"] if item["type"] == "reasoning"]
        return "".join(part["text"] for item in items for part in item["content"])
    return "".join(block["thinking"] for block in body["content"] if block["type"] == "thinking")


def assert_tokens_of(content: str, response: httpx.Response, *, stream: bool) -> None:
    """The log probabilities are those of the content's tokens, and of no others."""
    parts = chunks_of(response) if stream else response.json()["choices"]
    tokens = [t for part in parts for t in (part["logprobs"] or {}).get("content") or ()]
    assert "".join(token["token"] for token in tokens) == content, response.text


@pytest.mark.parametrize("path", ASKED)
def test_F03_thoughts_of_every_form_over_every_api(path: str) -> None:
    model = Model()
    with following(model) as front:
        for sample in ONE_THOUGHT_EACH.values():
            model.sample = sample
            for stream in (False, True):
                body = ASKED[path] | {"stream": stream}
                if path == CHAT:
                    body |= {"logprobs": True}
                if path == MESSAGES:
                    body |= {"thinking": {"type": "enabled", "budget_tokens": 1024}}
                    body |= {"max_tokens": 2048}
                response = front.client.post(path, json=body)
                content, calls, _ = (streamed if stream else answered)(path, response)
                found = (thought_in(path, response, stream=stream), content, calls)
                if path == CHAT:
                    assert_tokens_of(content, response, stream=stream)
                meant = (sample.reasoning, sample.content, sample.calls)
                assert found == meant, (sample, response.text)
