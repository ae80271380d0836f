"""Questions whose answers would be too long to send."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mayfly_protocol.codec import encode
from mayfly_protocol.requests import ChatPrompt, TextPrompt
from mayfly_protocol.serving import Detokenize, Detokenized, Tokenize, Tokenized
from mayfly_protocol.transport.sockets import MAX_FRAME_BYTES
from mayfly_worker import prepare
from mayfly_worker.request_errors import InvalidInput
from support import vocabularies

TOKENIZER = vocabularies.byte_level("thinking")
LOADED: Any = SimpleNamespace(tokenizer=TOKENIZER, probe=SimpleNamespace(width=len(TOKENIZER)))
CHAT = ChatPrompt(({"role": "user", "content": "a b c d e f g h"},))


def test_answers_within_the_bound_fit_into_a_frame() -> None:
    ids = (2**31 - 1,) * (prepare.MAX_ANSWER_BYTES // 5)
    assert len(encode(Tokenized("r" * 64, 1, len(ids), ids))) < MAX_FRAME_BYTES
    text = "x" * prepare.MAX_ANSWER_BYTES
    assert len(encode(Detokenized("r" * 64, 1, text))) < MAX_FRAME_BYTES


@pytest.mark.parametrize(
    ("inquiry", "param"),
    [
        (Tokenize("r", 1, TextPrompt("a b c d e f g h")), "prompt"),
        (Tokenize("r", 1, CHAT), "messages"),
        (Detokenize("r", 1, tuple(range(20, 60))), "tokens"),
    ],
)
def test_longer_ones_are_refused(
    monkeypatch: pytest.MonkeyPatch, inquiry: Tokenize | Detokenize, param: str
) -> None:
    prepare.answer_inquiry(inquiry, LOADED)
    monkeypatch.setattr(prepare, "MAX_ANSWER_BYTES", 20)
    with pytest.raises(InvalidInput) as refused:
        prepare.answer_inquiry(inquiry, LOADED)
    assert refused.value.param == param


def test_to_count_tokens_any_number_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "MAX_ANSWER_BYTES", 20)
    found = prepare.answer_inquiry(Tokenize("r", 1, CHAT, count_only=True), LOADED)
    assert isinstance(found, Tokenized) and found.count > 4
