"""A request sets the variables that the model's chat template names, and no others; its tools are
given to the template where it reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from mlx_lm.chat_templates import deepseek_v32
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mayfly_protocol.requests import ChatPrompt
from mayfly_worker.request_errors import InvalidInput
from mayfly_worker.text.chat_template import RESERVED_KWARGS, template_variables
from mayfly_worker.text.detokenize import hugging_face
from mayfly_worker.text.prompts import render
from mayfly_worker.text.tool_prompt import tools_place
from support import vocabularies

FUNCTION = {"name": "sum", "description": "Adds <|im_end|>.", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
LLAMA = """\
{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- set keep = keep_past_thinking | default(false) %}
{%- set effort = effort or 'low' %}
{%- set tone = tone if tone else 'plain' %}
{%- if messages[0].role == 'system' %}{% set loop_messages = messages[1:] %}
{%- else %}{% set loop_messages = messages %}{% endif %}
{%- macro show(message, depth=0, mood='') %}{{- message.content ~ depth }}{% endmacro %}
{%- if messages %}{% set part = messages[0].content.strip() %}{% endif %}
{%- set part = part.strip() %}{% set one, two = (part, part) %}{% set whole %}{{ one }}{% endset %}
{%- for message in loop_messages %}
{%- if message.content %}{% set shown = show(message) %}{% endif %}
{{- shown }}
{%- endfor %}
{{- '|' ~ date_string ~ '|' ~ keep ~ '|' ~ effort ~ '|' ~ tone ~ '|' ~ (tools or []) | length }}
{%- if thinking_mode == 'deep' %}{{- raise_exception(namespace(x='too deep').x) }}{% endif %}
{%- if add_generation_prompt %}{{- strftime_now('%Y') }}{% endif %}"""
"""Names variables in the ways of published templates, and sets some of its own."""

NAMED = ("custom_tools", "date_string", "effort", "keep_past_thinking", "thinking_mode", "tone")


def text_of(template: str | dict[str, str], tools: bool = False, **kwargs: Any) -> str:
    tokenizer = tokenizer_of(template)
    prompt = ChatPrompt(
        ({"role": "user", "content": "hi"},),
        tools=(TOOL,) if tools else (),
        template_kwargs=kwargs,
        date="2031-02-03",
    )
    return str(tokenizer.decode(render(prompt, tokenizer, 10**6).ids))


def expression(name: str) -> str:
    return "{{ " + name + " }}"


def tokenizer_of(template: str | dict[str, str]) -> TokenizerWrapper:
    if isinstance(template, str):
        return vocabularies.byte_level("plain", template)
    tokenizer = TokenizerWrapper(hugging_face(vocabularies.byte_level("plain", "unused")))
    hugging_face(tokenizer).chat_template = template
    return tokenizer


def test_F09_the_variables_of_a_template_are_those_that_it_reads() -> None:
    assert template_variables(tokenizer_of(LLAMA)) == NAMED
    assert template_variables(vocabularies.byte_level("thinking")) == (
        "enable_thinking",
        "with_date",
    )
    assert template_variables(vocabularies.byte_level("plain", "")) == ()


def test_F09_a_variable_that_the_template_reads_is_taken() -> None:
    assert text_of(LLAMA).startswith("hi0|26 Jul 2024|False|low|plain|0")
    shown = text_of(
        LLAMA, date_string="1 May", keep_past_thinking=True, effort="top", custom_tools=[TOOL]
    )
    assert shown.startswith("hi0|1 May|True|top|plain|1")
    with pytest.raises(InvalidInput, match="too deep"):
        text_of(LLAMA, thinking_mode="deep")


@pytest.mark.parametrize(
    "name",
    ["documents", "builtin_tools", "shown", "loop_messages", "depth", "bos_token", "part", "whole"],
)
def test_F09_a_variable_that_the_template_does_not_read_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput) as error:
        text_of(LLAMA, **{name: "x"})
    assert error.value.param == "chat_template_kwargs"
    assert f": {name} is" in str(error.value)
    assert ", ".join(NAMED) in str(error.value)


def test_F09_a_refused_name_that_is_none_is_not_repeated() -> None:
    with pytest.raises(InvalidInput) as error:
        text_of(LLAMA, **{"a secret text": 1})
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("name", sorted(RESERVED_KWARGS - {"tools"}))
def test_F09_what_the_server_sets_cannot_be_set(name: str) -> None:
    for template in (LLAMA, LLAMA + expression(name)):
        with pytest.raises(InvalidInput) as error:
            text_of(template, **{name: "x"})
        assert error.value.param == "chat_template_kwargs"


def test_F09_hints_about_thoughts_are_taken_by_every_template() -> None:
    hints: dict[str, Any] = {"enable_thinking": False, "reasoning_effort": "high"}
    assert text_of(LLAMA, thinking_budget=5, **hints) == text_of(LLAMA)


@pytest.mark.parametrize("value", [True, False])
def test_F09_a_template_has_its_own_name_for_the_switch_of_thoughts(value: bool) -> None:
    for read, asked in (("thinking", "enable_thinking"), ("enable_thinking", "thinking")):
        assert text_of(expression(read), **{asked: value}) == str(value)
        assert text_of(expression(read), **{asked: not value, read: value}) == str(value)
    both = "{{ thinking ~ '|' ~ enable_thinking }}"
    assert text_of(both, thinking=value).startswith(f"{value}|")
    assert text_of(both, enable_thinking=value) == f"|{value}"


def test_F09_each_of_several_templates_has_its_own_variables() -> None:
    several = {"default": "{{ mood }}", "tool_use": "{{ speed }}"}
    assert template_variables(tokenizer_of(several)) == ("mood", "speed")
    assert text_of(several, mood="good") == "good"
    assert text_of(several, tools=True, speed="high") == "high"
    for tools, name in ((False, "speed"), (True, "mood")):
        with pytest.raises(InvalidInput, match=f"{name} is a variable"):
            text_of(several, tools=tools, **{name: "x"})


def test_F09_mlx_lms_own_renderers_take_their_parameters() -> None:
    tokenizer = TokenizerWrapper(
        hugging_face(vocabularies.byte_level("plain")),
        chat_template=deepseek_v32.apply_chat_template,
    )
    names = template_variables(tokenizer)
    assert {"drop_thinking", "enable_thinking", "thinking_mode"} <= set(names)
    assert not {"messages", "tools", "context"} & set(names)
    user = {"role": "user", "content": "hi"}
    for kwargs in (
        {"thinking_mode": "chat"},
        {"enable_thinking": False, "reasoning_effort": "low"},
    ):
        rendered = render(ChatPrompt((user,), template_kwargs=kwargs), tokenizer, 10**6)
        assert str(tokenizer.decode(rendered.ids)).endswith("</think>")
    with pytest.raises(InvalidInput, match="context"):
        render(ChatPrompt((user,), template_kwargs={"context": []}), tokenizer, 10**6)


class Rendering(vocabularies.Characters):
    """A tokenizer that renders chats itself, as those of some models do."""

    def apply_chat_template(
        self, conversation: Any, tools: Any = None, thinking: bool = True, tone: str = "", **_: Any
    ) -> str:
        return f"{conversation[0]['content']}|{thinking}|{tone}"


def test_F09_tokenizers_that_render_chats_themselves_take_their_parameters() -> None:
    tokenizer = TokenizerWrapper(Rendering(eos_token="</s>"))
    assert template_variables(tokenizer) == ("thinking", "tone")
    user = {"role": "user", "content": "hi"}
    prompt = ChatPrompt((user,), template_kwargs={"enable_thinking": False, "tone": "warm"})
    assert tokenizer.decode(render(prompt, tokenizer, 10**6).ids) == "hi|False|warm"


@pytest.mark.parametrize("broken", ["{% if %}", "{{ x", "{% endfor %}"])
def test_F09_a_broken_template_has_no_variables(broken: str) -> None:
    assert template_variables(tokenizer_of(broken)) == ()
    with pytest.raises(InvalidInput, match="template"):
        text_of(broken)


# Tools


ROWS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}SYSTEM{% endfor %}"
IN_SYSTEM = ROWS.replace(
    "SYSTEM", "{% if m.tools %}<|tool|>{{ m['tools'] + '' }}<|/tool|>{% endif %}"
)
PLACES = {
    "objects": "{{ tools | tojson }}" + ROWS,
    "functions": "{% for t in tools %}{{ t['name'] + t.description }}{% endfor %}" + ROWS,
    "xml": "{% for t in xml_tools[:] %}{{ t | tojson }}{% endfor %}" + ROWS,
    "system": IN_SYSTEM,
}


@pytest.mark.parametrize("place", PLACES)
def test_F06_tools_are_given_where_the_template_reads_them(place: str) -> None:
    template = PLACES[place].replace("SYSTEM", "")
    text = text_of(template, tools=True)
    assert text.count("Adds <|im_end|>.") == text.count("sum") == 1
    assert "hi" in text
    if place == "system":
        tools = text.split("<|tool|>")[1].split("<|/tool|>")[0]
        assert json.loads(tools) == [FUNCTION]
        messages = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
        tokenizer = tokenizer_of(template)
        rendered = render(ChatPrompt(tuple(messages), tools=(TOOL,)), tokenizer, 10**6)
        assert str(tokenizer.decode(rendered.ids)) == (
            f"[system]system<|tool|>{tools}<|/tool|>[user]user[assistant]assistant"
        )
        assert rendered.system_tokens > 20
        assert rendered.ids.count(2) == 0  # the end of a turn, which the description names


def test_F06_the_place_of_tools_is_found() -> None:
    for template in ("{{ messages[0].content }}", "{# tools #}{{ messages[0].content }}"):
        assert tools_place(tokenizer_of(template)) is None
    found = {name: tools_place(tokenizer_of(template)) for name, template in PLACES.items()}
    assert found == {
        "objects": "tools",
        "functions": "bare",
        "xml": "xml_tools",
        "system": "system",
    }
    assert tools_place(tokenizer_of("{% if %}")) == "tools"  # nobody knows
