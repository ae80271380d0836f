"""Compiles grammars (of JSON schemas and the like) over a small vocabulary, and samples texts under
them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from mayfly_protocol.requests import Constraint
from mayfly_worker.grammar.compiler import CompiledGrammar, GrammarCompiler, GrammarMatcher
from support import vocabularies

PLAIN = vocabularies.byte_level("plain")
END = 2
WIDTH = 2000
GRAMMARS = GrammarCompiler(PLAIN, WIDTH)


def allowed(matcher: GrammarMatcher, width: int = WIDTH) -> list[int]:
    """Returns the ids of the tokens that the grammar allows next."""
    mask = np.zeros((width + 31) // 32, dtype=np.int32)
    matcher.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [int(id) for id in np.flatnonzero(bits)]


def sample(
    compiled: CompiledGrammar, seed: int, tokenizer: Any = PLAIN, longest: int = 1500
) -> str | None:
    """Samples a text that follows the grammar, each token drawn uniformly from those allowed;
    returns None if the text has not ended after ``longest`` tokens."""
    rng = np.random.default_rng(seed)
    matcher, ids = compiled.matcher(), []
    for _ in range(longest):
        id = int(rng.choice(allowed(matcher)))
        if id == END:
            return str(tokenizer.decode(ids))
        matcher.consume(id)
        ids.append(id)
    return None


def accepts(compiled: CompiledGrammar, text: str, tokenizer: Any = PLAIN) -> bool:
    """Returns True if the grammar allows exactly this text and then its end."""
    matcher = compiled.matcher()
    for id in vocabularies.ids_of(text, tokenizer):
        if id not in allowed(matcher):
            return False
        matcher.consume(id)
    return not tokenizer.eos_token_ids.isdisjoint(allowed(matcher))


def schema(value: Any, **options: Any) -> CompiledGrammar:
    return GRAMMARS.compile(Constraint("json_schema", json.dumps(value)), **options)
