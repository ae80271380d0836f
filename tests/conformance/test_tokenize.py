"""``/tokenize`` and ``/detokenize`` against a real server, and requests that they refuse."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from support.api_client import refused, tokenizer_of, user
from support.server import Server

TEXT = "Once upon a time, naïve 😀 你好"


def tokens(server: Server, **fields: Any) -> list[int]:
    response = server.post("/tokenize", fields)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["count"] == len(answer["tokens"])
    found: list[int] = answer["tokens"]
    return found


def text(server: Server, ids: list[int]) -> str:
    response = server.post("/detokenize", {"tokens": ids})
    assert response.status_code == 200, response.text
    assert list(response.json()) == ["prompt"]
    return str(response.json()["prompt"])


def test_texts(tiny: Server) -> None:
    ids = tokens(tiny, prompt=TEXT)
    assert ids == tokenizer_of(tiny).encode(TEXT).ids
    assert text(tiny, ids) == TEXT
    used = tiny.post("/v1/completions", {"prompt": TEXT, "max_tokens": 1}).json()["usage"]
    assert used["prompt_tokens"] == len(ids)


def test_special_tokens_can_be_left_out(fussy: Server) -> None:
    with_start, without = (
        tokens(fussy, prompt="hi"),
        tokens(fussy, prompt="hi", add_special_tokens=False),
    )
    assert with_start[1:] == without
    assert text(fussy, with_start) == "<|im_start|>hi"


def test_chats(tiny: Server) -> None:
    messages = [user(TEXT)]
    ids = tokens(tiny, messages=messages)
    assert text(tiny, ids) == (f"<|im_start|>user\n{TEXT}<|im_end|>\n<|im_start|>assistant\n")
    chat = {"messages": messages, "max_tokens": 1}
    used = tiny.post("/v1/chat/completions", chat).json()["usage"]
    assert used["prompt_tokens"] == len(ids)
    bare = tokens(tiny, messages=messages, add_generation_prompt=False)
    assert text(tiny, bare).endswith(f"{TEXT}<|im_end|>\n")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [user("a")]}, "prompt"),
        ("/tokenize", {"prompt": ""}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "dog", "content": ""}]}, "messages[0].role"),
        ("/tokenize", {"messages": [user("a")], "add_special_tokens": True}, "add_special_tokens"),
        (
            "/tokenize",
            {"messages": [user("a")], "chat_template_kwargs": {"tokenize": False}},
            "chat_template_kwargs",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": []}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
    ],
)
def test_what_has_no_tokens(tiny: Server, path: str, body: Any, param: str) -> None:
    refused(tiny.post(path, body), param)


def test_other_models(tiny: Server) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        refused(tiny.post(path, body | {"model": "nonsense"}), "model", status=404)


def test_what_is_not_served_is_not_found(tiny: Server) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        tiny.client.embeddings.create(model=tiny.model, input="hi")
    assert caught.value.code == "not_served"
    assert "embedding" in caught.value.message
    refused(tiny.post("/v1/rerank", {"query": "a", "documents": ["b"]}), status=404)
