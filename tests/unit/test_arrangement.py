"""Messages that a chat template refuses, drops or moves get into the prompt nonetheless."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mayfly_protocol.requests import ChatPrompt
from mayfly_worker.request_errors import InvalidInput
from mayfly_worker.text.arrangement import TemplateAbilities
from mayfly_worker.text.chat_template import abilities_of
from mayfly_worker.text.prompts import RenderedPrompt, render
from support import vocabularies
from support.models.tokenizer import STRICT_TEMPLATE

NO_SYSTEM = """\
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{{- '<start_of_turn>' + message.role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{% endif %}"""
"""In the shape of Gemma 2's: no system role, and roles that alternate."""

BESIDE_LAST = """\
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content %}{% set turns = messages[1:] %}
{%- else %}{% set turns = messages %}{% endif %}
{%- set spoken = namespace(n=0) %}
{%- for message in turns %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (spoken.n % 2 == 0) %}
{{- raise_exception('After the optional system message, conversation roles must alternate') }}
{%- endif %}{% set spoken.n = spoken.n + 1 %}{% endif %}
{%- endfor %}
{%- for message in turns %}
{%- if message.role == 'user' %}
{%- if tools and loop.last %}{{- '[TOOLS]' + tools | tojson }}{% endif %}
{{- '[INST]' }}
{%- if loop.last and system is defined %}{{- system + '\\n\\n' }}{% endif %}
{{- message.content + '[/INST]' }}
{%- elif message.tool_calls %}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('Tool call IDs of length 9!') }}{% endif %}
{{- '[CALL]' + call.function | tojson }}
{%- endfor %}
{%- elif message.role == 'assistant' %}{{- message.content + '</s>' }}
{%- elif message.role == 'tool' %}{{- '[RESULT]' + message.content + '[/RESULT]' }}
{%- else %}{{- raise_exception('Only user and assistant roles are supported') }}
{%- endif %}
{%- endfor %}"""
"""In the shape of Mistral's third: the system's text beside the last question, or nowhere."""

DROPPING = """\
{%- if messages[0].role in ('system', 'developer') %}
{{- '<|start|>developer<|message|>' + messages[0].content + '<|end|>' }}
{%- set turns = messages[1:] %}
{%- else %}{% set turns = messages %}{% endif %}
{%- for message in turns %}
{%- if message.role == 'user' %}{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|message|>' + message.content }}
{%- for call in message.tool_calls or [] %}{{- call.function | tojson }}{% endfor %}{{- '<|end|>' }}
{%- elif message.role == 'tool' %}{{- '<|start|>tool<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}"""
"""In the shape of gpt-oss's: a system message that is not the first vanishes."""

HOISTING = """\
{%- set ns = namespace(system='') %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- set ns.system = ns.system + message.content + '\\n' %}
{%- endif %}
{%- endfor %}
{{- ns.system }}
{%- for message in messages %}
{%- if message.role != 'system' %}{{- '<' + message.role + '>' + message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}{{- call.function | tojson }}{% endfor %}
{%- endfor %}"""
"""In the shape of DeepSeek V3's: all system messages come first."""

LENIENT = """\
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim }}
{%- for call in message.tool_calls or [] %}{{- call.function | tojson }}{% endfor %}
{{- '<|eot_id|>' }}
{%- endfor %}"""
"""In the shape of Llama 3's, without tools."""

NUMBERED = """\
{%- for message in messages %}
{{- message.role + ': ' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- if call.id | length != 9 %}{{ raise_exception('Tool call IDs of length 9!') }}{% endif %}
{{- call.function.name + '<' + call.id + '>' }}
{%- endfor %}
{%- if message.role == 'tool' %}{{- '<' + message.tool_call_id + '>' }}{% endif %}
{%- endfor %}"""
"""In the shape of Mistral Nemo's, as far as tool calls go."""

SHAPES = {
    "numbered": NUMBERED,
    "strict": STRICT_TEMPLATE,
    "no system": NO_SYSTEM,
    "beside last": BESIDE_LAST,
    "dropping": DROPPING,
    "hoisting": HOISTING,
    "lenient": LENIENT,
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {}}}
ALL = TemplateAbilities()


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def called(result: str) -> list[dict[str, Any]]:
    call = {"id": "t00000001", "type": "function", "function": {"name": "f", "arguments": {}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t00000001", "content": result},
    ]


def rendered(shape: str, *messages: dict[str, Any], tools: bool = False) -> RenderedPrompt:
    tokenizer = vocabularies.byte_level("plain", SHAPES[shape])
    return render(ChatPrompt(messages, tools=(TOOL,) if tools else ()), tokenizer, 2048)


def text(shape: str, *messages: dict[str, Any], tools: bool = False) -> str:
    found = rendered(shape, *messages, tools=tools)
    return str(vocabularies.byte_level("plain", SHAPES[shape]).decode(found.ids))


def lacks(shape: str, *, tools: bool = False) -> set[str]:
    can = abilities_of(vocabularies.byte_level("plain", SHAPES[shape]), tools)
    return {name for name in ALL.__slots__ if not getattr(can, name)}


def test_abilities_are_found_by_rendering() -> None:
    for tools in (False, True):
        assert lacks("strict", tools=tools) == {"several", "later"}
        assert lacks("hoisting", tools=tools) == {"later"}
        assert lacks("lenient", tools=tools) == set()
        assert lacks("dropping", tools=tools) == {"several", "later"}
    alternating = {"several", "later", "users_in_a_row", "texts_in_a_row"}
    assert lacks("no system") == alternating | {"developer", "leading", "results"}
    assert lacks("beside last") == alternating | {"leading", "user_after_tool", "any_call_id"}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("role", ["system", "developer"])
def test_N04_system_messages_at_the_start_are_all_read(shape: str, role: str) -> None:
    found = text(shape, said("system", "Be A."), said(role, "Be B."), said("user", "hi"))
    assert found.index("Be A.") < found.index("Be B.") < found.index("hi")


def test_N04_they_are_one_where_the_template_takes_one() -> None:
    apart = [said("system", "Be A."), said("system", ""), said("developer", "Be B.")]
    joined = said("system", "Be A.\n\nBe B.")
    for shape in ("strict", "dropping", "no system", "beside last"):
        assert rendered(shape, *apart, said("user", "hi")) == rendered(
            shape, joined, said("user", "hi")
        )
    assert text("lenient", *apart, said("user", "hi")).count("system<|end_header_id|>") == 3


@pytest.mark.parametrize("shape", SHAPES)
def test_N03_a_later_system_message_stays_in_its_place(shape: str) -> None:
    messages = [said("system", "Be A."), said("user", "hi"), said("system", "Be B.")]
    first = text(shape, *messages)
    assert first.index("hi") < first.index("Be B.")
    assert "Be A." in first
    more = [said("assistant", "yes"), said("system", "Be C."), said("user", "so?")]
    second = text(shape, *messages, *more)
    order = [second.index(each) for each in ("hi", "Be B.", "yes", "Be C.", "so?")]
    assert order == sorted(order)
    assert "Be A." in second


def test_N03_it_becomes_the_users_text() -> None:
    found = text("strict", said("system", "A."), said("user", "hi"), said("system", "B."))
    assert found == (
        "<|im_start|>system\nA.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>user\nB.<|im_end|>\n<|im_start|>assistant\n"
    )
    found = text("no system", said("system", "A."), said("user", "hi"), said("system", "B."))
    assert found == ("<start_of_turn>user\nA.\n\nhi\n\nB.<end_of_turn>\n<start_of_turn>model\n")
    assert text("lenient", said("user", "hi"), said("system", "B.")).count("system<|") == 1


@pytest.mark.parametrize("shape", ["strict", "dropping", "hoisting", "lenient", "no system"])
def test_N03_the_prompt_of_the_next_turn_begins_like_the_last(shape: str) -> None:
    turns = [said("system", "Be A."), said("user", "hi"), said("system", "Be B.")]
    turns += [said("assistant", "yes"), said("user", "so?"), said("system", "Be C.")]
    asked = [rendered(shape, *turns[:3]).ids, rendered(shape, *turns).ids]
    end = text(shape, *turns[:3]).index("Be B.") + len("Be B.")
    assert text(shape, *turns).startswith(text(shape, *turns[:3])[:end])
    assert asked[1][: len(asked[0]) - 8] == asked[0][:-8]


@pytest.mark.parametrize("shape", ["strict", "beside last", "dropping", "hoisting", "lenient"])
def test_N03_system_and_user_text_beside_a_tools_result(shape: str) -> None:
    turns = [said("system", "Be A."), said("user", "hi"), *called("42"), said("system", "Be B.")]
    turns += [said("user", "so?")]
    for end in (4, 5, 6):
        found = text(shape, *turns[:end], tools=True)
        wanted = ["hi", "42", "Be B.", "so?"][: end - 2]
        order = [found.rindex(each) for each in wanted]
        assert order == sorted(order)
        assert "Be A." in found
    assert (
        "[RESULT]42\n\nBe B.\n\nso?[/RESULT]" in found if shape == "beside last" else "so?" in found
    )


def test_users_in_a_row_are_one_where_roles_have_to_alternate() -> None:
    turns = [said("user", "It is me."), said("user", "hi"), said("assistant", "yes")]
    found = text("no system", *turns, said("user", "so?"))
    assert "user\nIt is me.\n\nhi<end_of_turn>" in found
    assert text("strict", *turns).count("<|im_start|>user") == 2


def test_texts_of_the_assistants_in_a_row_are_one_where_roles_have_to_alternate() -> None:
    """As of an answer that another request goes on with, or of one beside a comment on it."""
    turns = [said("user", "hi"), said("assistant", "One."), said("assistant", "Two.")]
    found = text("no system", *turns, said("user", "so?"))
    assert "assistant\nOne.\n\nTwo.<end_of_turn>" in found
    assert "[/INST]One.\n\nTwo.</s>" in text("beside last", *turns, said("user", "so?"))
    assert text("strict", *turns).count("<|im_start|>assistant") == 3


def test_a_call_gets_the_short_id_that_a_template_demands() -> None:
    turns = [said("user", "hi"), *called("42"), said("assistant", "yes")]
    short = rendered("beside last", *turns, said("user", "so?"), tools=True)
    assert lacks("beside last") >= {"any_call_id"}
    turns[1]["tool_calls"][0]["id"] = turns[2]["tool_call_id"] = "toolu_01AbC"
    found = text("numbered", *turns)
    [first, second] = re.findall(r"<(\w+)>", found)
    assert first == second
    assert re.fullmatch("[0-9a-f]{9}", first)
    assert rendered("beside last", *turns, said("user", "so?"), tools=True) == short
    turns[1]["tool_calls"][0]["id"] = turns[2]["tool_call_id"] = "t00000001"
    assert text("numbered", *turns).count("<t00000001>") == 2


def test_R20_what_the_template_still_refuses_is_refused_in_its_words() -> None:
    for messages in ([said("assistant", "a")], [said("assistant", "a"), *called("b")]):
        with pytest.raises(InvalidInput, match="roles must alternate"):
            text("no system", *messages)


def test_a_text_beside_calls_is_a_message_before_where_the_template_drops_it() -> None:
    kept = "{{- '[call]' + message.content + (message.tool_calls[0]"
    silent = SINGLE.replace("CHECK", "").replace(kept, "{{- '[call]' + (message.tool_calls[0]")
    assert silent != SINGLE.replace("CHECK", "")
    tokenizer = vocabularies.byte_level("plain", silent)
    assert not abilities_of(tokenizer, False).text_beside_calls
    call, result = called("b")
    messages = (said("user", "a"), {**call, "content": "Well."}, result, call, result)
    found = str(tokenizer.decode(render(ChatPrompt(messages), tokenizer, 2048).ids))
    made = '[call]{"name": "f", "arguments": {}}[tool]b'
    assert found == f"[user]a[assistant]Well.{made}{made}"
    # Where roles alternate, a message more is refused.
    assert abilities_of(vocabularies.byte_level("plain", BESIDE_LAST), True).text_beside_calls


def test_nothing_is_rewritten_for_a_template_that_refuses_the_tools_it_is_tried_with() -> None:
    """Some read the fields of a parameter without asking whether it has them."""
    picky = "{% for tool in tools or [] %}{{ tool.function.parameters.properties.x.unit + '' }}"
    shape = "{% endfor %}{% for m in messages %}{{ m.role + m.content }}"
    calls = "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}{% endfor %}"
    tokenizer = vocabularies.byte_level("plain", picky + shape + calls)
    function = {"name": "g", "parameters": {"properties": {"x": {"unit": "kg"}}}}
    prompt = ChatPrompt((said("user", "a"), *called("b")), tools=({"function": function},))
    assert tokenizer.decode(render(prompt, tokenizer, 2048).ids) == "kguseraassistantftoolb"


def test_calls_and_results_are_texts_where_the_template_knows_none() -> None:
    found = text("no system", said("user", "hi"), *called("fine"), *called("good"))
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    call += "<end_of_turn>\n<start_of_turn>user\n<tool_response>\n"
    assert found.count(f"assistant\n{call}") == 2
    assert found.index(f"{call}fine\n<") < found.index(f"{call}good\n<")


def test_the_system_prompts_tokens_are_counted_in_a_users_message_too() -> None:
    system, other = said("system", "Be brief. " * 9), said("user", "bye")
    one = rendered("no system", system, said("user", "hi"))
    assert one.system_tokens > 20
    shared = rendered("no system", system, other).ids[: one.system_tokens]
    assert shared == one.ids[: one.system_tokens]


_turns = st.lists(st.sampled_from(["user", "system", "developer", "assistant", "tool"]), max_size=8)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(SHAPES)), _turns, st.booleans())
def test_N03_N04_no_text_is_lost(shape: str, roles: list[str], tools: bool) -> None:
    messages = []
    for number, role in enumerate(["system", "user", *roles]):
        if role == "tool":
            messages += called(f"say {number}.")
        else:
            messages.append(said(role, f"say {number}."))
    try:
        found = text(shape, *messages, tools=tools)
    except InvalidInput as error:
        assert shape in ("no system", "beside last")
        assert "alternate" in str(error)
        assert {"tool", "assistant"} & set(roles)
    else:
        for message in messages:
            if not message.get("tool_calls"):
                assert message["content"] in found


SINGLE = """\
{%- for message in messages %}
{%- if message.tool_calls %}
CHECK
{{- '[call]' + message.content + (message.tool_calls[0].function | tojson) }}
{%- else %}{{- '[' + message.role + ']' + message.content }}{% endif %}
{%- endfor %}"""
"""In the shape of Llama 3's: one call in a message."""

ONLY_ONE = """
{%- if message.tool_calls | length != 1 %}{{ raise_exception('Only one call at once!') }}{% endif %}
"""


@pytest.mark.parametrize("check", ["", ONLY_ONE])
def test_several_calls_are_a_message_each_where_the_template_prints_one(check: str) -> None:
    tokenizer = vocabularies.byte_level("plain", SINGLE.replace("CHECK", check))
    assert not abilities_of(tokenizer, False).several_calls
    calls = [
        {"id": id, "type": "function", "function": {"name": f"f{id}", "arguments": {}}}
        for id in "abc"
    ]
    results = [{"role": "tool", "tool_call_id": id, "content": f"is {id}"} for id in "cxa"]
    answer = {"role": "assistant", "content": "Well.", "tool_calls": calls}
    messages = (said("user", "hi"), answer, *results, said("user", "and?"))
    found = str(tokenizer.decode(render(ChatPrompt(messages), tokenizer, 2048).ids))
    parts = [part.split(", ")[0] for part in re.split(r"(?=\[(?:call|user|tool)\])", found) if part]
    assert parts == [
        *("[user]hi", '[call]Well.{"name": "fa"', "[tool]is a", '[call]{"name": "fb"'),
        *('[call]{"name": "fc"', "[tool]is c", "[tool]is x", "[user]and?"),
    ]
    several = vocabularies.byte_level("tools")
    assert abilities_of(several, True).several_calls
