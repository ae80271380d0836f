"""Sessions of an agent find their system prompt in the prefix cache. The requests are shaped like
Claude Code's; docs/reported-faults.md lists the ids in test names."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Any

from mlx_lm.utils import load_tokenizer

from mayfly_protocol.requests import ChatPrompt
from mayfly_protocol.serving import Finish
from mayfly_server.api.affinity_keys import chat_key
from mayfly_server.api.anthropic.messages_prompt import chat_prompt
from mayfly_server.api.anthropic.messages_request import MessagesRequest
from mayfly_worker.text.prompts import RenderedPrompt, render
from support.api_client import Json, answer
from support.models import tiny as tiny_models
from support.models.tokenizer import STRICT_TEMPLATE
from support.server import Server
from support.worker import WorkerProcess, generation

RULES = "\n".join(f"{n}. Read file number {n} before you change it." for n in range(40))
CACHED = {"cache_control": {"type": "ephemeral", "scope": "global"}}


def text(said: str, **fields: Any) -> Json:
    return {"type": "text", "text": said, **fields}


def tool(name: str) -> Json:
    schema = {"type": "object", "properties": {"path": {"type": "string"}}}
    return {"name": name, "description": f"{name}s a file.", "input_schema": schema}


def first_turn(hash: str, question: str) -> Json:
    """The first request of a session: its billing line is unlike any other's."""
    billing = f"x-anthropic-billing-header: cc_version=2.1.{hash}; cc_entrypoint=cli; cch={hash};"
    reminder = text("<system-reminder>\nToday is Tuesday.\n</system-reminder>\n")
    return {
        "max_tokens": 4,
        "temperature": 0,
        "system": [text(billing), text("You are an agent. "), text(RULES, **CACHED)],
        "tools": [tool("Read"), tool("Edit"), {"type": "web_search_20250305", "name": "web"}],
        "messages": [
            {"role": "user", "content": [reminder, text(question, **CACHED)]},
            {"role": "system", "content": "Kinds of agents: explorer, reviewer."},
        ],
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": f"user_{hash}"},
    }


def next_turn(before: Json, hash: str) -> Json:
    call = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a.png"}}
    image = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [image], **CACHED}
    turn = first_turn(hash, "")
    turn["messages"] = [
        *before["messages"],
        {"role": "assistant", "content": [text("I see."), call]},
        {"role": "user", "content": [result]},
    ]
    return turn


def prompt(body: Json) -> ChatPrompt:
    return chat_prompt(MessagesRequest.model_validate(body))


def rendered(folder: Path, body: Json) -> RenderedPrompt:
    return render(prompt(body), load_tokenizer(folder), 1 << 20)


def common(one: RenderedPrompt, other: RenderedPrompt) -> int:
    pairs = zip(one.ids, other.ids, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_N09_sessions_share_their_system_prompt(tiny: Server) -> None:
    first, other = first_turn("36ee5", "What does a.png show?"), first_turn("0aaa9", "Who are you?")
    bodies = [first, next_turn(first, "77c01"), other]
    found = [answer(tiny, "/v1/messages", **body)["usage"] for body in bodies]
    prompts = [rendered(tiny.folder, body) for body in bodies]
    for usage, one in zip(found, prompts, strict=True):
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(one.ids)
    turn, session = (usage["cache_read_input_tokens"] for usage in found[1:])
    shared = common(prompts[0], prompts[2])
    assert shared > 500
    assert session >= 0.9 * shared
    assert turn >= 0.9 * len(prompts[0].ids)
    keys = [chat_key(prompt(body).messages) for body in (*bodies, first_turn("5", "Who are you?"))]
    assert keys[0] == keys[1]
    assert keys[2] == keys[3]


def test_N03_N09_so_they_do_where_the_template_takes_one_system_message(tmp_path: Path) -> None:
    """The states of this architecture cannot be cut to a shorter prefix: only the ends of a system
    prompt and of a prompt are found."""
    folder = tiny_models.build(
        tmp_path / "model", architecture="qwen3_next", tokenizer="tools", template=STRICT_TEMPLATE
    )
    first, other = first_turn("36ee5", "What does a.png show?"), first_turn("0aaa9", "Who are you?")
    bodies = [first, next_turn(first, "77c01"), other]
    prompts = [rendered(folder, body) for body in bodies]
    with WorkerProcess(folder, tmp_path) as worker:
        worker.wait_ready()
        ends = [worker.ask(generation(prompt(body), max_tokens=4)).end for body in bodies]
    turn, session = (end.usage.cached_tokens for end in ends[1:] if isinstance(end, Finish))
    assert prompts[0].system_tokens == prompts[2].system_tokens > 500
    assert session >= 0.9 * prompts[0].system_tokens
    assert turn >= 0.9 * len(prompts[0].ids)
