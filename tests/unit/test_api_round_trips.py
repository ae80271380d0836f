"""An answer that comes back over an API is in the next prompt token for token as it was written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from mayfly_protocol.requests import ChatPrompt
from mayfly_protocol.serving import Submit
from mayfly_worker.text.choice import ChoiceText
from mayfly_worker.text.prompts import render
from support import vocabularies
from support.answer_templates import CALL, KIMI, SHORT, THOUGHT, answering, kimi_calls
from support.doubles.fake_node import ScriptStep, accept, finish, step
from support.front_client import CHAT, following

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SCHEMA = {"type": "object", "properties": {"x": {}, "y": {}}}
OFFERED: dict[str, dict[str, Any]] = {
    CHAT: {"type": "function", "function": {"name": "sum", "parameters": SCHEMA}},
    RESPONSES: {"type": "function", "name": "sum", "parameters": SCHEMA},
    MESSAGES: {"name": "sum", "input_schema": SCHEMA},
}
SHAPES = {
    "spaced": answering("spaced"),
    "stripped": answering("stripped"),
    "parsed": answering("parsed"),
    "tool_plan": answering("tool_plan"),
    "joined": answering("joined"),
    "kimi": KIMI,
    "short": SHORT,
}
TEXTS = {
    "kimi": (kimi_calls("functions.sum:3"), "Well." + kimi_calls("functions.sum:0", "sum:1")),
    "short": ('[TOOL_CALLS]sum[CALL_ID]aB3dE5fG7[ARGS]{"x": 7}',),
    "joined": (CALL, f"Well.{CALL}"),
}
THINKING_TEXTS = tuple(
    f"{thought}{text}"
    for thought in ("", THOUGHT)
    for text in ("It is\n 11. ", CALL, f"Let me see.\n{CALL}", f"{CALL}\n{CALL}")
)


@dataclass
class Model:
    """Writes a text by the worker's text handling, and keeps the prompts that it was given."""

    tokenizer: Any
    text: str = ""
    prompts: list[list[int]] = field(default_factory=list)

    def __call__(self, submit: Submit) -> Iterator[ScriptStep]:
        prompt = submit.generation.prompt
        assert isinstance(prompt, ChatPrompt)
        rendered = render(prompt, self.tokenizer, 10**6)
        self.prompts.append(rendered.ids)
        ids = vocabularies.ids_of(self.text, self.tokenizer)
        choice = ChoiceText(submit.generation, self.tokenizer, rendered, rid=submit.rid, choice=0)
        yield accept(submit)
        for at, piece in enumerate([*map(choice.feed, ids), choice.feed(2, eos=True)]):
            yield step(
                submit,
                at,
                piece.text,
                reasoning=piece.reasoning,
                tool_calls=piece.tool_calls,
                finish=piece.finish,
            )
        yield finish(submit, len(ids) + 1)


def sent_back(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The answer as a client sends it back, with a result for each of its calls."""
    if path == CHAT:
        message = body["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "11"} for c in calls]
        return [message, *results]
    if path == RESPONSES:
        calls = [item for item in body["output"] if item["type"] == "function_call"]
        return body["output"] + [
            {"type": "function_call_output", "call_id": c["call_id"], "output": "11"} for c in calls
        ]
    calls = [block for block in body["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": c["id"], "content": "11"} for c in calls]
    user = {"role": "user", "content": results or "And?"}
    return [{"role": "assistant", "content": body["content"]}, user]


@pytest.mark.parametrize("path", OFFERED)
@pytest.mark.parametrize("shape", SHAPES)
def test_F04_F05_F06_an_answer_comes_back_as_it_was_written(shape: str, path: str) -> None:
    model = Model(vocabularies.byte_level("thinking", SHAPES[shape]))
    asked = {"role": "user", "content": "add 7 and 4"}
    key = "input" if path == RESPONSES else "messages"
    fields = (
        {"tools": [OFFERED[path]], "max_tokens": 99}
        if path == MESSAGES
        else {"tools": [OFFERED[path]]}
    )
    with following(model) as front:
        for text in TEXTS.get(shape, THINKING_TEXTS):
            model.text, model.prompts = text, []
            conversation = [asked]
            for _ in range(2):
                response = front.client.post(path, json=fields | {key: conversation})
                assert response.status_code == 200, response.text
                conversation = [*conversation, *sent_back(path, json.loads(response.text))]
            first, second = model.prompts
            written = [*first, *vocabularies.ids_of(text, model.tokenizer)]
            assert second[: len(written)] == written, model.tokenizer.decode(second)
