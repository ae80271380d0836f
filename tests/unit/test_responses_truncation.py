"""``truncation: "auto"``: which messages are dropped from a conversation that is too long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mayfly_protocol.requests import ChatPrompt
from mayfly_server.api.responses.responses_prompt import prompt_limit, shortened

ROLES = {"s": "system", "u": "user", "a": "assistant", "c": "assistant", "t": "tool"}


def conversation(letters: str) -> tuple[dict[str, Any], ...]:
    """Messages, one a letter: system, user, assistant, (assistant with a) call, tool."""
    return tuple(
        {"role": ROLES[letter], "content": f"{letter}{at}"}
        | ({"tool_calls": [{"id": "c"}]} if letter == "c" else {})
        for at, letter in enumerate(letters)
    )


def left(letters: str, limit: int) -> str:
    """The messages that are left if each counts as one token."""
    asked = []

    async def count(prompt: ChatPrompt) -> int:
        asked.append(prompt)
        return len(prompt.messages)

    found = asyncio.run(shortened(ChatPrompt(conversation(letters)), limit, count))
    assert len(asked) <= 2 + len(letters).bit_length()
    return " ".join(message["content"] for message in found.messages)


@pytest.mark.parametrize(
    ("letters", "limit", "expected"),
    [
        ("sua", 3, "s0 u1 a2"),
        ("suauau", 5, "s0 u3 a4 u5"),
        ("suauau", 2, "s0 u5"),
        ("suauau", 1, "s0 u5"),
        ("uuauua", 4, "u3 u4 a5"),
        ("suctctct", 6, "s0 u1 c4 t5 c6 t7"),
        ("suctctct", 1, "s0 u1 c6 t7"),
        ("suasucttct", 5, "s0 s3 u4 c8 t9"),
        ("sauau", 4, "s0 u2 a3 u4"),
        ("sa", 1, "s0 a1"),
        ("s", 0, "s0"),
        ("a", 0, "a0"),
    ],
)
def test_N02_the_oldest_turns_go_first(letters: str, limit: int, expected: str) -> None:
    assert left(letters, limit) == expected


@given(st.text("suact", min_size=1), st.integers(0, 20))
def test_N02_no_more_is_dropped_than_has_to_be(letters: str, limit: int) -> None:
    kept = left(letters, limit).split()
    everything = left(letters, len(letters)).split()
    assert [one for one in everything if one in kept] == kept
    assert len(everything) == len(letters)
    if len(letters) <= limit:
        assert kept == everything
    assert {one for one in everything if one[0] == "s"} <= set(kept)
    if "u" in letters:
        assert f"u{letters.rindex('u')}" in kept
    smaller = left(letters, 0).split()
    assert len(kept) <= max(limit, len(smaller))


@pytest.mark.parametrize(
    ("max_tokens", "limit"), [(None, 3584), (96, 4000), (4096, 2048), (100_000, 2048)]
)
def test_room_is_kept_for_the_answer(max_tokens: int | None, limit: int) -> None:
    assert prompt_limit(4096, max_tokens) == limit
