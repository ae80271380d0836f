"""Structured output through a whole server: a random-weight model, which knows nothing of JSON,
writes documents that are valid under every schema of the corpus."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema

from support.schemas import SCHEMAS
from support.server import Server

MAX_TOKENS = 600
DRAWS = ((0.0, 0), (1.5, 1), (1.5, 2))
"""Temperature and seed."""


def document(server: Server, name: str, temperature: float, seed: int) -> str | None:
    """The text that came back, or None where max_tokens cut it."""
    answer = server.client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": f"Give me JSON: {name}"}],
        temperature=temperature,
        seed=seed,
        max_tokens=MAX_TOKENS,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "document", "schema": SCHEMAS[name], "strict": True},
        },
    )
    [choice] = answer.choices
    if choice.finish_reason == "length":
        assert answer.usage is not None
        assert answer.usage.completion_tokens == MAX_TOKENS
        return None
    assert choice.finish_reason == "stop"
    return choice.message.content or ""


def test_every_document_is_valid_under_its_schema(tiny: Server) -> None:
    wanted: list[Any] = [(name, *draw) for name in SCHEMAS for draw in DRAWS]
    with ThreadPoolExecutor(24) as pool:
        documents = list(pool.map(lambda asked: document(tiny, *asked), wanted))
    for (name, *_), text in zip(wanted, documents, strict=True):
        if text is not None:
            jsonschema.validate(json.loads(text), SCHEMAS[name])
    assert len(SCHEMAS) >= 40
    # Schemas are bounded, so cut documents are those that ran into a very long number or text.
    assert sum(text is None for text in documents) <= len(documents) // 50
    # Draws differ, where a schema leaves a choice.
    assert len(set(documents)) > len(SCHEMAS) * 1.5
