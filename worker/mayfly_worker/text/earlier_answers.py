"""Brings a model's earlier answers into the form in which its chat template prints them as the
model wrote them.

A client sends an answer back as it was sent: its thought, its text and its calls apart, each with
the whitespace that the model wrote around it. The prompt of the next turn should contain this
answer token for token as it was generated: the prefix cache holds it so, and the model was trained
on no other form. Templates differ in what they need for that, which small conversations show that
are rendered once for each template (:func:`probe_answers`):

- the field of the thought: ``reasoning_content``, ``thinking``, ``tool_plan`` ..., or the content
  itself, between the markers of reasoning, if the template takes it apart there. A template that
  leaves thoughts out of earlier turns goes on doing so;
- the whitespace that the template itself writes around the thought and before the calls, which is
  taken off the texts;
- the arguments of calls: an object, or JSON text, if the template joins them to other texts;
- the calls themselves, which a template may not print: then they are part of the text, in the
  dialect that the model writes;
- the ids of calls: the model's own; or, if the template names tools by them, as Kimi K2's does,
  ``functions.NAME:N`` with a number that runs through the conversation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from mayfly_worker.text.call_ids import own_id
from mayfly_worker.text.dialects.dialect import Dialect, OutputFormat
from mayfly_worker.text.tool_prompt import EXAMPLE, example_in, written

Message: TypeAlias = dict[str, Any]
Render: TypeAlias = Callable[[list[Message]], str]

THOUGHT = "reasoning_content"
"""Field in which a request's messages have their thoughts."""

_FIELDS = (THOUGHT, "reasoning", "thinking", "thought", "tool_plan")
_ID = "abcdefgh1"
"""An id that every template takes: some demand nine letters and digits."""
_ASKED, _RESULT, _SAID, _THOUGHT, _VALUE = (f"plum-{n}" for n in range(5))
_OBJECT = {"x": _VALUE}
_NUMBER = re.compile(r":(\d{1,9})\Z")


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """Form of an answer, either of one with calls or of one without, in the messages that a chat
    template takes. ``field`` is the thought's. The other fields are whitespace that the template
    writes: before the thought, after the thought, before the text that follows it, between the
    text and the calls. ``blank`` stands for a thought of nothing but whitespace. ``inline`` are the
    texts between which a thought stands in the content, if the template takes it apart there;
    ``joined`` says that the template takes a thought or a text, and refuses both."""

    field: str = THOUGHT
    before: str = ""
    after: str = ""
    gap: str = ""
    tail: str = ""
    blank: str = ""
    inline: tuple[str, str] | None = None
    joined: bool = False


@dataclass(frozen=True, slots=True)
class AnswerForms:
    """Forms of earlier answers that one chat template takes: of those without calls (``plain``) and
    of those with calls. ``json_arguments`` says that it takes the arguments of calls as text,
    ``numbered_ids`` that their ids name the tool, ``prints_calls`` that it prints calls; if not,
    the model writes them in the ``dialect``, which is None for the form that a grammar enforces.
    ``example`` is the call EXAMPLE as it stands in prompts, if it was asked for and can be read."""

    plain: AnswerForm = AnswerForm()
    calling: AnswerForm = AnswerForm()
    json_arguments: bool = False
    numbered_ids: bool = False
    prints_calls: bool = True
    dialect: Dialect | None = None
    example: str = ""


def probe_answers(
    render: Render, name: str, output: OutputFormat, opened: str = "", *, described: bool = False
) -> AnswerForms:
    """Finds the forms of earlier answers that a chat template takes. ``render`` renders a
    conversation with it, ``name`` is the name of a tool that it knows, ``output`` is the form of
    the model's output, and ``opened`` is the whitespace behind a start marker of reasoning at the
    end of prompts."""
    thought = output.thought
    markers = (thought.start + opened, thought.end) if thought else None

    def printed(*messages: Message) -> str:
        try:
            return render(list(messages))
        except Exception:
            return ""  # templates are programs, which refuse a conversation by any exception

    def plain(**fields: Any) -> str:
        return printed(_USER, {"role": "assistant", "content": _SAID, **fields})

    def older(**fields: Any) -> str:
        return printed(_USER, {"role": "assistant", "content": _SAID, **fields}, _USER)

    as_object, as_text = (
        printed(*_calling(name, arguments)) for arguments in (_OBJECT, json.dumps(_OBJECT))
    )
    json_arguments = _VALUE in as_text and (_VALUE not in as_object or str(_OBJECT) in as_object)
    arguments = json.dumps(_OBJECT) if json_arguments else _OBJECT

    def calling(**fields: Any) -> str:
        return printed(*_calling(name, arguments, **{"content": _SAID, **fields}))

    tail = _whitespace(calling().partition(_SAID)[2])
    found = [_form(plain), _form(calling)]
    alone = _form(partial(calling, content="")) if found[1] is None and calling() else None
    if alone is not None and not calling(**{alone.field: _THOUGHT}):
        found[1] = replace(alone, joined=True)
    if known := [form for form in found if form is not None]:
        # A template may print thoughts in one kind of answer only, or in certain turns.
        forms = [form or known[0] for form in found]
    else:
        forms = [AnswerForm(inline=_inline(render, markers)) for render in (older, calling)]
    other = f"{name}_too"
    call = printed(*_calling(other, arguments)[:2])
    prints_calls = any(each in call for each in (_VALUE, other, _ID)) or _VALUE in calling()
    if not plain():
        prints_calls = True  # the template refuses all that was tried
    example = ""
    if described:
        given = EXAMPLE["arguments"]
        shown = printed(*_calling(EXAMPLE["name"], json.dumps(given) if json_arguments else given))
        example = example_in(shown, output.calls) if prints_calls else ""
        if not example and (example := example_in(written([EXAMPLE], output.calls), output.calls)):
            prints_calls = False
    return AnswerForms(
        forms[0],
        replace(forms[1], tail=tail),
        json_arguments=json_arguments,
        numbered_ids=f"functions.{other}:" in call or (_ID in call and other not in call),
        prints_calls=prints_calls,
        dialect=None if prints_calls else output.calls,
        example=example,
    )


_PARTS: tuple[Any, ...] = (
    [{"type": "thinking", "thinking": _THOUGHT}, {"type": "text", "text": _SAID}],
    {"blocks": [{"type": "thoughts", "text": _THOUGHT}, {"type": "response", "text": _SAID}]},
)
"""A thought and a text as parts of the content, as templates of Mistral and Apertus take them."""

_USER: Message = {"role": "user", "content": _ASKED}


def _calling(name: str, arguments: Any, **fields: Any) -> list[Message]:
    call = {"id": _ID, "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        _USER,
        {"role": "assistant", "content": "", "tool_calls": [call], **fields},
        {"role": "tool", "tool_call_id": _ID, "name": name, "content": _RESULT},
    ]


def _form(render: Callable[..., str]) -> AnswerForm | None:
    """Finds the form of an answer; None if the template prints its thought in no field. ``render``
    renders an answer with certain fields."""
    for field in _FIELDS:
        text = render(**{field: _THOUGHT})
        start, found, end = text.partition(_THOUGHT)
        if not found:
            continue
        before, after = _whitespace(start, -1), _whitespace(end)
        head, said, _ = end.partition(_SAID)
        blank = next((b for b in (before + after, "") if render(**{field: b}) == start + end), "")
        return AnswerForm(field, before, after, _whitespace(head, -1) if said else "", blank=blank)
    return None


def _whitespace(text: str, side: int = 1) -> str:
    """Returns the whitespace at the beginning of a text, or with ``side`` -1 at its end."""
    if side < 0:
        return text[len(text.rstrip()) :]
    return text[: len(text) - len(text.lstrip())]


def _inline(render: Callable[..., str], markers: tuple[str, str] | None) -> tuple[str, str] | None:
    """Returns the ``markers`` of reasoning if a template prints a thought that stands in the
    content between them, but otherwise than a text between other words: a template that prints
    every content as it stands knows nothing of thoughts, unless it takes them as parts of the
    content and prints them between the markers itself."""
    if markers is None:
        return None
    begin, end = markers[0].rstrip(), markers[1]
    as_parts = (render(content=parts) for parts in _PARTS)
    written = f"{begin}{_THOUGHT}{end}{_SAID}"
    if any(written in text for text in as_parts) and written in render(content=written):
        return markers

    def content(begin: str, end: str) -> str:
        return f"{begin} \n\n{_THOUGHT} \n\n{end} \n\n\n{_SAID}"

    stand_ins = ("plum-begin", "plum-end")
    text, expected = render(content=content(*markers)), render(content=content(*stand_ins))
    for stand_in, marker in zip(stand_ins, markers, strict=True):
        expected = expected.replace(stand_in, marker)
    return markers if _THOUGHT in text and expected and text != expected else None


def restore(messages: Sequence[Mapping[str, Any]], forms: AnswerForms) -> list[Message]:
    """Returns a conversation's messages with the assistant's, and the ids of tools' results, in the
    form that a template takes. The content of each message has to be a text."""
    restored = _with_template_ids(messages, numbered=forms.numbered_ids)
    for message in restored:
        if message.get("role") == "assistant":
            if not forms.prints_calls and message.get("tool_calls"):
                message["content"] += written(
                    [call["function"] for call in message.pop("tool_calls")], forms.dialect
                )
            _restore_texts(message, forms)
            if forms.json_arguments and message.get("tool_calls"):
                message["tool_calls"] = [_with_json(call) for call in message["tool_calls"]]
    return restored


def _with_template_ids(messages: Sequence[Mapping[str, Any]], *, numbered: bool) -> list[Message]:
    """Returns copies of messages in which calls and results have the ids that the template gets. A
    call without an id gets one, and a result without an id that of the first call without a
    result."""
    changed: list[Message] = []
    ids: dict[str, str] = {}
    unanswered: list[str] = []
    number = 0
    for message in map(dict, messages):
        changed.append(message)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = []
            for call in calls:
                given = call.get("id") or f"call_{len(ids)}"
                id = own_id(given)
                if numbered:
                    found = _NUMBER.search(id)
                    if found and (id != given or id.startswith("functions.")):
                        number = int(found[1])
                    else:
                        id = f"functions.{call['function']['name']}:{number}"
                    number += 1
                ids[given] = id
                unanswered.append(id)
                message["tool_calls"].append({**call, "id": id})
        elif message.get("role") == "tool":
            given = message.get("tool_call_id")
            id = ids.get(given, given) if given else next(iter(unanswered), "")
            if id:
                message["tool_call_id"] = id
            if id in unanswered:
                unanswered.remove(id)
    return changed


def _restore_texts(message: Message, forms: AnswerForms) -> None:
    calls = message.get("tool_calls")
    form = forms.calling if calls else forms.plain
    thought, content = message.pop(THOUGHT, ""), message["content"]
    if thought and form.inline:
        start, end = form.inline
        opened = "" if thought[:1].isspace() else start[len(start.rstrip()) :]
        content = f"{start.rstrip()}{opened}{thought}{end}{content}"
    elif thought and content.strip() and form.joined:
        message[form.field], content = f"{thought}\n\n{content}", ""
    elif thought:
        inner = thought.removeprefix(form.before).removesuffix(form.after)
        message[form.field] = inner if inner.strip() else form.blank
        content = content.removeprefix(form.gap) if form.gap else content.lstrip("\n")
    if calls:
        content = content.removesuffix(form.tail) if content.strip() else ""
    message["content"] = content


def _with_json(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}
