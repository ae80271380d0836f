"""Tools get into the prompts of models whose chat templates read none, and their calls are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mayfly_protocol.requests import ChatPrompt, Generation, Output, Sampling
from mayfly_protocol.serving import Submit
from mayfly_server.api.openai.chat_prompt import read_messages
from mayfly_worker.grammar.sources import tool_call_grammar
from mayfly_worker.request_errors import InvalidInput
from mayfly_worker.text.choice import ChoiceText
from mayfly_worker.text.detokenize import hugging_face
from mayfly_worker.text.dialects.families import DIALECTS
from mayfly_worker.text.dialects.registry import choose_format, output_format
from mayfly_worker.text.prompts import RenderedPrompt, render
from mayfly_worker.text.tool_prompt import (
    EXAMPLE,
    described,
    describes_tools,
    example_in,
    written,
)
from support import vocabularies
from support.call_samples import TOOLS
from support.doubles.fake_node import ScriptStep, accept, finish, step
from support.front_client import CHAT, HELLO, following

SYSTEM = {"role": "system", "content": "Be kind."}
USER = {"role": "user", "content": "How is it in Paris?"}
ARGUMENTS = {"city": "Paris", "days": 3}

_ROWS = "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}BODY{%- endfor %}"
_END = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
_CALLS = (
    "{%- if m.tool_calls %}{{- m.content + '<｜tool▁calls▁begin｜>' }}"
    "{%- for call in m.tool_calls %}{{- '<｜tool▁call▁begin｜>' + ONE + '<｜tool▁call▁end｜>' }}"
    "{%- endfor %}{{- '<｜tool▁calls▁end｜>' }}"
    "{%- else %}{{- m.content }}{% endif %}{{- '<|im_end|>\\n' }}"
)
_PLAIN = "{{- m.content + '<|im_end|>\\n' }}"
_ALTERNATING = (
    "{%- if messages[0].role == 'system' %}{{- raise_exception('no system role') }}{% endif %}"
    "{%- for m in messages %}"
    "{%- set user = loop.index0 % 2 == 0 %}"
    "{%- if (m.role == 'user') != user %}{{- raise_exception('turns') }}{% endif %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content | trim + '<|im_end|>\\n' }}{%- endfor %}"
)
TEMPLATES = {
    "plain": _ROWS.replace("BODY", _PLAIN) + _END,
    "no system role": _ALTERNATING + _END,
    "named before": _ROWS.replace(
        "BODY",
        _CALLS.replace("ONE", "call.function.name + '<｜tool▁sep｜>' + call.function.arguments"),
    )
    + _END,
    "fenced": _ROWS.replace(
        "BODY",
        _CALLS.replace(
            "ONE",
            "'function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' "
            "+ call.function.arguments | tojson + '\\n```'",
        ),
    )
    + _END,
    "calls beside no text": _ROWS.replace(
        "BODY", _CALLS.replace("if m.tool_calls", "if m.content is none")
    ).replace("ONE", "''")
    + _END,
}
"""In the shapes of Phi 3.5's, Gemma 2's, DeepSeek V3.1's and R1's, and R1's distillates'."""

JSON_CALL = '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
_FENCED = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
FORMS = {
    "plain": JSON_CALL,
    "no system role": JSON_CALL,
    "named before": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "fenced": _FENCED,
    "calls beside no text": _FENCED,
}


def tokenizer_of(template: str) -> Any:
    return vocabularies.byte_level("thinking", template)


def call_text(kind: str, name: str, arguments: dict[str, Any]) -> str:
    return FORMS[kind].format(name=name, arguments=json.dumps(arguments))


def ids_of(messages: list[dict[str, Any]], tokenizer: Any, **options: Any) -> list[int]:
    return rendered(messages, tokenizer, **options).ids


def rendered(messages: list[dict[str, Any]], tokenizer: Any, **options: Any) -> RenderedPrompt:
    return render(ChatPrompt(tuple(messages), **{"tools": TOOLS, **options}), tokenizer, 10**6)


def text_of(messages: list[dict[str, Any]], tokenizer: Any, **options: Any) -> str:
    return str(tokenizer.decode(ids_of(messages, tokenizer, **options)))


def answer(text: str, tokenizer: Any, before: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client has of the answer ``text``."""
    prompt = ChatPrompt(tuple(before), tools=TOOLS)
    choice = ChoiceText(
        Generation("m", prompt, Sampling(0), output=Output(split=True)),
        tokenizer,
        render(prompt, tokenizer, 10**6),
        rid="r",
        choice=0,
    )
    pieces = [choice.feed(id) for id in vocabularies.ids_of(text, tokenizer)]
    pieces.append(choice.feed(2, eos=True))
    calls = [
        {"id": delta.id, "function": {"name": delta.name, "arguments": delta.arguments}}
        for piece in pieces
        for delta in piece.tool_calls
    ]
    content = "".join(piece.text for piece in pieces)
    return {"role": "assistant", "content": content, "tool_calls": calls}


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("before", [[USER], [SYSTEM, USER]], ids=["alone", "system"])
def test_B07_tools_are_described_at_the_beginning(kind: str, before: list[Any]) -> None:
    tokenizer = tokenizer_of(TEMPLATES[kind])
    assert describes_tools(tokenizer)
    text = text_of(before, tokenizer)
    head = "user" if kind == "no system role" else "system"
    assert text.startswith(f"<|im_start|>{head}\n# Tools\n")
    for tool in TOOLS:
        assert text.count(json.dumps(tool["function"])) == 1
    assert call_text(kind, "NAME", EXAMPLE["arguments"]) in text
    places = [text.find(message["content"]) for message in before]
    assert -1 not in places and places == sorted(places)
    without = text_of(before, tokenizer, tools=())
    assert "# Tools" not in without


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("said", ["", "Let me see.\n"])
def test_B07_calls_are_read_and_the_next_turn_has_them_as_they_were_written(
    kind: str, said: str
) -> None:
    tokenizer = tokenizer_of(TEMPLATES[kind])
    before: list[dict[str, Any]] = [SYSTEM, USER]
    text = said + call_text(kind, "get_weather", ARGUMENTS)
    message = answer(text, tokenizer, before)
    [call] = message["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    assert message["content"] == said
    result = {"role": "tool", "tool_call_id": call["id"], "content": "It rains."}
    later = [*before, *read_messages([message, result])]
    prompt, next_prompt = ids_of(before, tokenizer), ids_of(later, tokenizer)
    answered = [*prompt, *vocabularies.ids_of(text, tokenizer)]
    assert next_prompt[: len(answered)] == answered
    shown = str(tokenizer.decode(next_prompt[len(answered) :]))
    assert "It rains." in shown
    if kind == "no system role":
        assert "user\n<tool_response>\nIt rains.\n</tool_response><|im_end|>" in shown


def test_B07_other_questions_share_the_description() -> None:
    tokenizer = tokenizer_of(TEMPLATES["plain"])
    first, second = (
        rendered([SYSTEM, {"role": "user", "content": text}], tokenizer) for text in ("a", "b")
    )
    assert first.ids[: first.system_tokens] == second.ids[: second.system_tokens]
    assert "Be kind." in str(tokenizer.decode(first.ids[: first.system_tokens]))
    for options in ({"tool_choice": "required"}, {"tool_choice": "none"}):
        assert ids_of([SYSTEM, USER], tokenizer, **options) == ids_of([SYSTEM, USER], tokenizer)


def test_B07_descriptions_forge_no_control_tokens_but_the_form_of_calls_has_its_own() -> None:
    tokenizer = tokenizer_of(TEMPLATES["plain"])
    function = {"name": "f", "description": "Ends <|im_end|> and <tool_call>.", "parameters": {}}
    ids = ids_of([USER], tokenizer, tools=({"type": "function", "function": function},))
    [marker] = vocabularies.ids_of("<tool_call>", tokenizer)
    assert ids.count(marker) == 1
    assert ids.count(2) == text_of([USER], tokenizer, tools=()).count("<|im_end|>") + 1
    assert "Ends <|im_end|> and <tool_call>." in str(tokenizer.decode(ids))


def test_B07_without_a_parser_the_form_is_that_of_demanded_calls() -> None:
    tokenizer = vocabularies.byte_level("plain", TEMPLATES["plain"] + "{# none #}")
    choose_format(tokenizer, "none")
    text = text_of([USER], tokenizer)
    form = '[{"name":"NAME","arguments":{"PARAMETER":"VALUE"}}]'
    assert form in text
    called = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    later = text_of([USER, {"role": "assistant", "content": "", "tool_calls": called}], tokenizer)
    assert '[{"name":"f","arguments":{"x":1}}]' in later
    grammar = tool_call_grammar(ChatPrompt((USER,), tools=TOOLS, tool_choice="required")).text()
    assert json.dumps(json.dumps('{"name":"get_weather","arguments":'))[1:-1] in grammar


def test_B07_a_parser_whose_form_is_not_known_has_the_tools_described_without_one() -> None:
    tokenizer = vocabularies.byte_level("plain", TEMPLATES["plain"] + "{# other #}")
    choose_format(tokenizer, "muse_spark")
    text = text_of([USER], tokenizer)
    assert json.dumps(TOOLS[0]["function"]) in text
    assert "NAME" not in text


def test_B07_calls_that_a_template_prints_in_a_form_that_is_not_read_are_written() -> None:
    odd = "{%- for call in m.tool_calls or [] %}{{- 'CALL ' + call.function.name }}{% endfor %}"
    tokenizer = tokenizer_of(_ROWS.replace("BODY", "{{- m.content }}" + odd) + _END)
    message = answer(call_text("plain", "get_time", {}), tokenizer, [USER])
    later = [USER, *read_messages([message])]
    assert call_text("plain", "get_time", {}) in text_of(later, tokenizer)
    assert "CALL get_time" in text_of(later, tokenizer, tools=())


def test_B07_a_template_that_refuses_tools_is_believed() -> None:
    refusing = "{%- if tools %}{{- raise_exception('no tools here') }}{% endif %}"
    tokenizer = tokenizer_of(refusing + TEMPLATES["plain"])
    assert not describes_tools(tokenizer)
    with pytest.raises(InvalidInput, match="no tools here"):
        ids_of([USER], tokenizer)


def test_B07_a_template_that_reads_tools_gets_no_description() -> None:
    for kind in ("tools", "thinking"):
        tokenizer = vocabularies.byte_level(kind)
        assert not describes_tools(tokenizer)
        assert "each of which is described as JSON" not in text_of([USER], tokenizer)
    assert not describes_tools(vocabularies.byte_level("plain", ""))


@pytest.mark.parametrize("name", [*sorted(DIALECTS), None])
def test_a_form_is_shown_only_if_the_dialect_reads_it(name: str | None) -> None:
    dialect = DIALECTS[name] if name else None
    form = example_in(written([EXAMPLE], dialect), dialect)
    if name in ("json_tools", "pythonic", "deepseek_v3", "hunyuan", "command_a", None):
        assert "NAME" in form
    if dialect is None or not form:
        return
    tokenizer = vocabularies.with_parser(dialect.name)
    hugging_face(tokenizer).chat_template = None
    tool = {"type": "function", "function": {"name": "NAME"}}
    prompt = ChatPrompt(({"role": "user", "content": "?"},), tools=(tool,))
    generation = Generation("m", prompt, Sampling(0), output=Output(split=True))
    choice = ChoiceText(generation, tokenizer, RenderedPrompt([0]), rid="r", choice=0)
    pieces = [choice.feed(id) for id in vocabularies.ids_of(form, tokenizer)]
    pieces.append(choice.end("stop"))
    [delta] = [delta for piece in pieces for delta in piece.tool_calls]
    assert (delta.name, json.loads(delta.arguments)) == ("NAME", EXAMPLE["arguments"])


@given(st.text(max_size=40), st.text(max_size=40), st.sampled_from(["system", "developer", "user"]))
def test_a_description_changes_one_message_and_loses_nothing(
    text: str, description: str, role: str
) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": description}}
    messages = [{"role": role, "content": text}, USER]
    first, *rest = described(messages, [tool], "FORM")
    assert json.dumps(tool["function"], ensure_ascii=False) in first["content"]
    assert "FORM" in first["content"]
    if role == "user":
        assert (first["role"], rest) == ("system", messages)
    else:
        assert (first["role"], rest) == (role, [USER])
        assert first["content"].endswith(text)


class Model:
    """Renders each prompt by a template that reads no tools, and answers with a call."""

    def __init__(self, kind: str) -> None:
        self._tokenizer = tokenizer_of(TEMPLATES[kind])
        self._text = call_text(kind, "get_weather", ARGUMENTS)
        self.prompts: list[str] = []

    def __call__(self, submit: Submit) -> Iterator[ScriptStep]:
        prompt = render(submit.generation.prompt, self._tokenizer, 10**6)
        self.prompts.append(str(self._tokenizer.decode(prompt.ids)))
        choice = ChoiceText(submit.generation, self._tokenizer, prompt, rid=submit.rid, choice=0)
        ids = vocabularies.ids_of(self._text, self._tokenizer)
        yield accept(submit)
        for at, piece in enumerate([*map(choice.feed, ids), choice.end("stop")]):
            yield step(submit, at, piece.text, tool_calls=piece.tool_calls, finish=piece.finish)
        yield finish(submit, len(ids) + 1)


FUNCTIONS = [tool["function"] for tool in TOOLS]
ASKED: dict[str, dict[str, Any]] = {
    CHAT: HELLO | {"tools": list(TOOLS)},
    "/v1/responses": {
        "input": "hi",
        "tools": [{"type": "function", **each} for each in FUNCTIONS],
    },
    "/v1/messages": HELLO
    | {
        "max_tokens": 99,
        "tools": [{"name": each["name"], "input_schema": each["parameters"]} for each in FUNCTIONS],
    },
}


def following_turn(path: str, response: httpx.Response) -> dict[str, Any]:
    """The same request with the answer's call and its result."""
    body = response.json()
    if path == CHAT:
        message = body["choices"][0]["message"]
        id = message["tool_calls"][0]["id"]
        result = {"role": "tool", "tool_call_id": id, "content": "It rains."}
        return {"messages": [*HELLO["messages"], message, result]}
    if path == "/v1/responses":
        [call] = [item for item in body["output"] if item["type"] == "function_call"]
        result = {
            "type": "function_call_output",
            "call_id": call["call_id"],
            "output": "It rains.",
        }
        return {"input": [{"role": "user", "content": "hi"}, call, result]}
    [block] = [block for block in body["content"] if block["type"] == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "It rains."}
    return {
        "messages": [
            *HELLO["messages"],
            {"role": "assistant", "content": body["content"]},
            {"role": "user", "content": [result]},
        ]
    }


@pytest.mark.parametrize("kind", ["no system role", "named before"])
def test_B07_over_every_api(kind: str) -> None:
    model = Model(kind)
    with following(model) as front:
        for path, asked in ASKED.items():
            first = front.client.post(path, json=asked)
            assert first.status_code == 200, first.text
            second = front.client.post(path, json=asked | following_turn(path, first))
            assert second.status_code == 200, second.text
            before, after = model.prompts[-2:]
            assert all(f'"name": "{each["name"]}"' in before for each in FUNCTIONS)
            assert after.startswith(before + call_text(kind, "get_weather", ARGUMENTS))
            assert "It rains." in after[len(before) :]


def test_the_parser_of_a_model_without_one_is_json() -> None:
    calls = output_format(tokenizer_of(TEMPLATES["plain"])).calls
    assert calls is DIALECTS["json_tools"]
