"""Earlier answers of the model get into the prompt token for token as the model wrote them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.chat_templates import deepseek_v32
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mayfly_protocol.requests import ChatPrompt, Generation, Output, Sampling
from mayfly_server.api.openai.chat_prompt import read_messages
from mayfly_worker.request_errors import InvalidInput
from mayfly_worker.text.call_ids import call_id, own_id
from mayfly_worker.text.chat_template import answer_forms
from mayfly_worker.text.choice import ChoiceText
from mayfly_worker.text.detokenize import hugging_face
from mayfly_worker.text.earlier_answers import AnswerForms, restore
from mayfly_worker.text.prompts import render
from support import vocabularies
from support.answer_templates import (
    CALL,
    CALLS,
    JOINED,
    KIMI,
    PARTED,
    SHORT,
    SPACED,
    STRIPPED,
    THINKING,
    THOUGHT,
    kimi_calls,
    with_answers,
)

TOOL = {
    "type": "function",
    "function": {
        "name": "sum",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"x": {}, "y": {}}},
    },
}
USER = {"role": "user", "content": "add 7 and 4"}

OLD_DROPPED = SPACED.replace("if message", "if messages[-1].role == 'tool' and message")


def template(answer: str, *, opening: str = "") -> TokenizerWrapper:
    return vocabularies.byte_level("thinking", with_answers(answer, opening=opening))


def ids_of(messages: list[dict[str, Any]], tokenizer: Any, **options: Any) -> list[int]:
    prompt = ChatPrompt(tuple(messages), tools=(TOOL,), **options)
    return render(prompt, tokenizer, 10**6).ids


def answer(
    text: str, tokenizer: Any, *, before: list[dict[str, Any]], early: bool = False, rid: str = "r"
) -> dict[str, Any]:
    """The message that a client has of the answer ``text``."""
    prompt = ChatPrompt(tuple(before), tools=(TOOL,))
    generation = Generation("m", prompt, Sampling(0), output=Output(split=True, early_calls=early))
    choice = ChoiceText(generation, tokenizer, render(prompt, tokenizer, 10**6), rid=rid, choice=0)
    pieces = [choice.feed(id) for id in vocabularies.ids_of(text, tokenizer)]
    pieces.append(choice.feed(2, eos=True))
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(piece.text for piece in pieces),
        "reasoning_content": "".join(piece.reasoning for piece in pieces),
    }
    calls: list[dict[str, Any]] = []
    for delta in (delta for piece in pieces for delta in piece.tool_calls):
        if delta.name is not None:
            calls.append({"id": delta.id, "function": {"name": delta.name, "arguments": ""}})
        calls[-1]["function"]["arguments"] += delta.arguments
    return {**message, "tool_calls": calls} if calls else message


def turn(text: str, tokenizer: Any, *, before: list[dict[str, Any]], **how: Any) -> Any:
    """The conversation after an answer ``text`` and the results of its calls."""
    said = answer(text, tokenizer, before=before, **how)
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "11"}
        for call in said.get("tool_calls", ())
    ]
    return [*before, *read_messages([said, *results])]


def assert_exact(text: str, tokenizer: Any, *, opening: str = "", **how: Any) -> None:
    """The next turn's prompt begins with this turn's prompt and the answer."""
    prompt = ids_of([USER], tokenizer)
    later = ids_of(turn(text, tokenizer, before=[USER], **how), tokenizer)
    written = tokenizer.decode(prompt) + text + "<|im_end|>\n"
    assert tokenizer.decode(later).startswith(written)
    whole = [*prompt, *vocabularies.ids_of(text, tokenizer)]
    assert later[: len(whole)] == whole


TEXTS = ("It is 11.", CALL, f"Let me see.\n{CALL}", f"{CALL}\n{CALL}\n{CALL}")


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("thought", ["", THOUGHT, "<think>\n\n  I add.\n I do.\n</think>\n\n"])
@pytest.mark.parametrize("kind", THINKING)
def test_an_answer_is_rendered_back_as_it_was_written(
    kind: str, thought: str, text: str, early: bool
) -> None:
    if kind in ("stripped", "parsed"):
        thought = thought.replace("\n\n  ", "\n")
    assert_exact(thought + text, template(THINKING[kind] + CALLS), early=early)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", THINKING)
def test_an_answer_to_a_prompt_that_begins_the_thought_is_rendered_back(
    kind: str, text: str
) -> None:
    tokenizer = template(THINKING[kind] + CALLS, opening="<think>\\n")
    assert_exact("I add.\n</think>\n\n" + text, tokenizer)


@pytest.mark.parametrize("kind", ["thinking", "thoughts"])
def test_F03_a_thought_that_a_template_takes_as_a_part_of_the_content_is_rendered_back(
    kind: str,
) -> None:
    tokenizer = template(PARTED.replace("KIND", f"'{kind}'") + CALLS)
    for text in ("It is 11.", " \nIt is 11.", f"\n{CALL}", f"Let me see.\n{CALL}"):
        assert_exact(f"<think>I add.</think>{text}", tokenizer)
    assert_exact("It is 11.", tokenizer)


@pytest.mark.parametrize("text", TEXTS)
def test_an_empty_thought_is_rendered_back(text: str) -> None:
    empty = SPACED.replace(
        "if message.reasoning_content", "if message.reasoning_content is defined"
    )
    for answered in (STRIPPED, empty):
        assert_exact("<think>\n\n</think>\n\n" + text, template(answered + CALLS))


def test_thoughts_that_a_template_drops_stay_dropped() -> None:
    tokenizer = template(OLD_DROPPED + CALLS)
    now = turn(THOUGHT + TEXTS[1], tokenizer, before=[USER])
    assert "I add." in tokenizer.decode(ids_of(now, tokenizer))
    later = [*turn(THOUGHT + "It is 11.", tokenizer, before=[USER]), USER]
    assert "assistant\nIt is 11.<|im_end|>" in tokenizer.decode(ids_of(later, tokenizer))


def test_a_thought_in_the_content_of_a_template_that_only_prints_it_is_left_out() -> None:
    tokenizer = template("{{- message.content }}")
    later = turn(THOUGHT + "It is 11.", tokenizer, before=[USER])
    assert "assistant\nIt is 11.<|im_end|>" in tokenizer.decode(ids_of(later, tokenizer))


@pytest.mark.parametrize("text", TEXTS)
def test_a_template_that_drops_thoughts_from_contents_gets_none(text: str) -> None:
    dropping = "{%- if not loop.last %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    tokenizer = template(dropping + "{{- content }}" + CALLS)
    with_thought, without = (
        tokenizer.decode(ids_of(turn(thought + text, tokenizer, before=[USER]), tokenizer))
        for thought in (THOUGHT, "")
    )
    assert with_thought == without


def test_a_template_that_takes_thoughts_out_of_some_contents_gets_none_in_others() -> None:
    """DeepSeek V3.1's template prints the content beside calls as it stands."""
    split = "{%- if not message.tool_calls %}{% set content = content.split('</think>')[-1] %}"
    tokenizer = template("{{- '<think></think>' }}" + split + "{% endif %}{{- content }}" + CALLS)
    for text in TEXTS:
        later = turn(THOUGHT + text, tokenizer, before=[USER])
        assert f"assistant\n<think></think>{text}<|im_end|>" in tokenizer.decode(
            ids_of(later, tokenizer)
        )


def test_a_template_that_takes_a_thought_or_a_text_beside_calls_gets_one() -> None:
    """As that of gpt-oss, which refuses both."""
    refusing = "{%- if message.tool_calls and content and message.thinking %}"
    tokenizer = template(
        refusing + "{{- raise_exception('not both!') }}{% endif %}"
        "{%- if message.tool_calls %}{{- '<think>' + (message.thinking or content) + '</think>' }}"
        "{%- else %}{{- content }}{% endif %}" + CALLS
    )
    for said in (f"Well.{CALL}", CALL, f"Well.{CALL}\n{CALL}"):
        later = turn(f"<think>I add.</think>{said}", tokenizer, before=[USER])
        text = tokenizer.decode(ids_of(later, tokenizer))
        joined = "\n\nWell." if "Well" in said else ""
        assert f"<think>I add.{joined}</think>" in text
    later = turn(f"Well.{CALL}", tokenizer, before=[USER])
    assert "<think>Well.</think>" in tokenizer.decode(ids_of(later, tokenizer))


def test_a_variable_that_keeps_thoughts_has_them_rendered_as_they_were_written() -> None:
    tokenizer = template(SPACED.replace("if message", "if keep_thoughts and message"))
    later = turn(THOUGHT + "It is 11.", tokenizer, before=[USER])
    shown = ids_of(later, tokenizer, template_kwargs={"keep_thoughts": True})
    assert f"assistant\n{THOUGHT}It is 11.<|im_end|>" in tokenizer.decode(shown)
    assert "assistant\nIt is 11.<|im_end|>" in tokenizer.decode(ids_of(later, tokenizer))


@settings(max_examples=40, deadline=None)
@given(
    st.text("ab \n\t", max_size=6),
    st.text("ab \n\t", max_size=6),
    st.integers(0, 3),
    st.sampled_from(["spaced", "thinking"]),
)
def test_no_text_is_lost_beside_whitespace(before: str, after: str, calls: int, kind: str) -> None:
    tokenizer = template(THINKING[kind] + CALLS)
    text = f"<think>{before}</think>{after}" + CALL * calls
    later = tokenizer.decode(ids_of(turn(text, tokenizer, before=[USER]), tokenizer))
    answered = later.split("<|im_start|>assistant\n")[1].split("<|im_end|>")[0]
    assert answered.split() == text.replace("</tool_call><", "</tool_call> <").split() or (
        "".join(answered.split()) == "".join(text.split())
        or not before.strip()  # a thought of whitespace alone may not be printed at all
    )


# Whitespace beside calls


@pytest.mark.parametrize("early", [False, True])
def test_whitespace_beside_calls_is_no_content(early: bool) -> None:
    tokenizer = template("{{- message.content }}" + CALLS)
    for text in ("\n", " \n\n", f"\n{THOUGHT}\n", THOUGHT):
        said = answer(f"{text}{CALL}", tokenizer, before=[USER], early=early)
        assert (said["content"], len(said["tool_calls"])) == ("", 1)
        alone = answer(text, tokenizer, before=[USER], early=early)
        assert alone["content"] == text.replace(THOUGHT.strip(), "")
        text += "Well. \n"
        said = answer(f"{text}{CALL}", tokenizer, before=[USER], early=early)
        assert said["content"] == text.replace(THOUGHT.strip(), "")
    for text in (f"{CALL}\n{CALL}\n\n", f"{CALL} \n{CALL}"):
        said = answer(text, tokenizer, before=[USER], early=early)
        assert (said["content"], len(said["tool_calls"])) == ("", 2)
    said = answer(f"a \n{CALL}\n b\n {CALL}\n", tokenizer, before=[USER], early=early)
    assert (said["content"], len(said["tool_calls"])) == ("a \n\n b\n ", 2)
    unread = f"{CALL}\n<tool_call>?</tool_call>\n"
    assert answer(unread, tokenizer, before=[USER])["content"] == unread[len(CALL) :]


# Arguments


@pytest.mark.parametrize("early", [False, True])
def test_F06_a_template_that_joins_arguments_to_texts_gets_json(early: bool) -> None:
    assert_exact(f"Well.{CALL}", template(JOINED), early=early)


@pytest.mark.parametrize(
    "printed",
    [
        "{{- '' ~ call.function.arguments }}",
        "{{- call.function.arguments if call.function.arguments is string else {}['?'] + 1 }}",
    ],
)
def test_F06_arguments_are_never_printed_as_pythons(printed: str) -> None:
    loop = "{%- for call in message.tool_calls or [] %}" + printed + "{% endfor %}"
    tokenizer = template("{{- message.content }}" + loop)
    function = {"name": "sum", "arguments": {"x": 7, "y": [1.5, "é\n"]}}
    calls = [{"id": "a", "type": "function", "function": function}]
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": calls}]
    text = tokenizer.decode(ids_of(messages, tokenizer))
    assert 'assistant\n{"x": 7, "y": [1.5, "é\\n"]}<|im_end|>' in text


def test_F06_a_template_that_takes_both_gets_an_object() -> None:
    both = "{{- call.function.arguments if call.function.arguments is string else 'object' }}"
    loop = "{%- for call in message.tool_calls or [] %}" + both + "{% endfor %}"
    forms = answer_forms(template("{{- message.content }}" + loop), True, ())
    assert forms.json_arguments  # the object's values are not printed
    assert not answer_forms(template(STRIPPED + CALLS), True, ()).json_arguments
    tokenizer = TokenizerWrapper(
        hugging_face(template(STRIPPED)), chat_template=deepseek_v32.apply_chat_template
    )
    assert answer_forms(tokenizer, True, ()).json_arguments


# Calls that a template does not print


UNPRINTED = {
    "{# <|tool_list_start|> #}": '<|tool_call_start|>[sum(x=7, y="a"), sum()]<|tool_call_end|>',
    "{# <tool_call> tool_call.name #}": (
        '<tool_call>\n{"name": "sum", "arguments": {"x": 7, "y": "a"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "sum", "arguments": {}}\n</tool_call>'
    ),
    "{# <tool_calls> </tool_calls> #}": (
        '<tool_calls>[{"name": "sum", "arguments": {"x": 7, "y": "a"}}, '
        '{"name": "sum", "arguments": {}}]</tool_calls>'
    ),
}


@pytest.mark.parametrize("words", UNPRINTED)
def test_calls_that_a_template_does_not_print_are_text_as_the_model_wrote_it(words: str) -> None:
    tokenizer = template(words + "{{- content }}")
    assert not answer_forms(tokenizer, True, ()).prints_calls
    for text in (UNPRINTED[words], f"Well.\n{UNPRINTED[words]}"):
        assert len(answer(text, tokenizer, before=[USER])["tool_calls"]) == 2
        assert_exact(text, tokenizer)


# Ids


@pytest.mark.parametrize("early", [False, True])
def test_F05_the_models_own_ids_survive(early: bool) -> None:
    tokenizer = vocabularies.byte_level("thinking", KIMI)
    first = kimi_calls("functions.sum:0", "functions.sum:1")
    assert_exact(first, tokenizer, early=early)
    before = [*turn(first, tokenizer, before=[USER], early=early, rid="a"), USER]
    later = turn(kimi_calls("functions.sum:0"), tokenizer, before=before, early=early, rid="b")
    ids = [call["id"] for message in later for call in message.get("tool_calls", ())]
    assert len(set(ids)) == 3  # clients look results up by id
    assert all(id.replace("_", "").replace("-", "").isalnum() and len(id) <= 64 for id in ids)
    text = tokenizer.decode(ids_of(later, tokenizer))
    assert first in text
    assert text.count("## Return of functions.sum:0\n") == 2
    assert text.count("## Return of functions.sum:1\n") == 1


def test_F05_calls_of_other_servers_get_ids_that_name_their_tool() -> None:
    tokenizer = vocabularies.byte_level("thinking", KIMI)

    def called(*ids: str) -> list[dict[str, Any]]:
        function = {"name": "sum", "arguments": {}}
        calls = [{"id": id, "type": "function", "function": function} for id in ids]
        results = [{"role": "tool", "tool_call_id": id, "content": "1"} for id in reversed(ids)]
        return [USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results]

    messages = [*called("toolu_1", "call_2"), *called("functions.sum:5", "x"), *called("y")]
    text = tokenizer.decode(ids_of(messages, tokenizer))
    for number in (0, 1, 5, 6, 7):
        assert text.count(f"<|tool_call_begin|>functions.sum:{number}<") == 1
        assert text.count(f"## Return of functions.sum:{number}\n") == 1


def test_F05_only_templates_that_name_calls_by_ids_number_them() -> None:
    for answered in THINKING.values():
        forms = answer_forms(template(answered + CALLS), True, ())
        assert not forms.numbered_ids


@given(st.text(max_size=200), st.text(max_size=12), st.integers(0, 9), st.integers(0, 9))
def test_F05_an_id_holds_the_models_own(own: str, rid: str, choice: int, index: int) -> None:
    id = call_id(rid, choice, index, own)
    assert id == call_id(rid, choice, index, own)
    assert id != call_id(rid, choice, index + 1, own)
    assert id.isascii() and id.replace("_", "").replace("-", "").isalnum()
    written = own.encode("utf-8", "replace")
    assert own_id(id) == (written.decode() if 0 < len(written) <= 160 else id)


@given(st.text(max_size=60))
def test_any_id_of_a_client_is_taken(id: str) -> None:
    assert own_id(f"call_0123456789ab_{id}") or not id
    message = {"role": "tool", "tool_call_id": id, "content": ""}
    assert restore([message], replace(AnswerForms(), numbered_ids=True)) == [message]


@pytest.mark.parametrize("early", [False, True])
def test_F04_ids_that_the_model_wrote_are_given_back(early: bool) -> None:
    tokenizer = vocabularies.byte_level("plain", SHORT)
    written = "".join(
        f'[TOOL_CALLS]sum[CALL_ID]{id}[ARGS]{{"x": 7}}' for id in ("aB3dE5fG7", "1" * 9)
    )
    assert_exact(written, tokenizer, early=early)
    text = tokenizer.decode(ids_of(turn(written, tokenizer, before=[USER]), tokenizer))
    assert text.count("aB3dE5fG7") == text.count("1" * 9) == 2


def test_F04_calls_and_results_without_ids_are_paired_in_their_order() -> None:
    tokenizer = vocabularies.byte_level("plain", SHORT)
    function = {"name": "sum", "arguments": {}}
    calls = [{"type": "function", "function": function} for _ in range(2)]
    results = [{"role": "tool", "content": content} for content in ("first", "second")]
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    text = tokenizer.decode(ids_of(messages, tokenizer))
    ids = [part.split("[ARGS]")[0] for part in text.split("[CALL_ID]")[1:]]
    assert len(set(ids)) == 2
    assert f'"content": first, "call_id": "{ids[0]}"' in text
    assert f'"content": second, "call_id": "{ids[1]}"' in text


def test_a_template_that_refuses_is_an_error_still() -> None:
    tokenizer = template("{{- raise_exception('no answers here') }}")
    with pytest.raises(InvalidInput, match="no answers here"):
        ids_of([USER, {"role": "assistant", "content": "a"}], tokenizer)
