"""Token ids of texts that a request names: bad words, and the sequence breakers of DRY.

A text can be generated as different tokens, with others before and after it in the same token:

* a *bad word* is forbidden as the tokens in which the tokenizer writes it, at the beginning of a
  text and after a space, as in vLLM;
* a *sequence breaker* is any token whose text contains it, and any token that ends with its
  beginning followed by the tokens in which the tokenizer writes the rest, as in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from mayfly_worker.engine.history import SequenceBreakers
from mayfly_worker.request_errors import InvalidInput
from mayfly_worker.text.detokenize import TokenTexts

MOST_BAD_SEQUENCES = 1024
"""Largest number of token sequences that the bad words of one request may have."""


def bad_sequences(words: Sequence[str], tokenizer: Any, width: int) -> tuple[tuple[int, ...], ...]:
    """Returns the token sequences that a request's bad words forbid. Raises InvalidInput if there
    are too many, or if they have tokens that the model does not know."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = _ids(tokenizer, word.lstrip())
        spaced = _ids(tokenizer, f" {word.lstrip()}")
        found[bare] = None
        # A tokenizer that adds a space of its own writes both alike, or the space as a token.
        if len(spaced) == len(bare) and spaced[:1] != bare[:1]:
            found[spaced] = None
    sequences = tuple(sequence for sequence in found if sequence)
    if any(id >= width for sequence in sequences for id in sequence):
        raise InvalidInput("a word has tokens that this model cannot generate", "bad_words")
    if len(sequences) > MOST_BAD_SEQUENCES:
        raise InvalidInput(
            f"these words have {len(sequences)} token sequences; send words with at most "
            f"{MOST_BAD_SEQUENCES}",
            "bad_words",
        )
    return sequences


@lru_cache(maxsize=64)
def sequence_breakers(texts: tuple[str, ...], tokenizer: Any, width: int) -> SequenceBreakers:
    """Returns the tokens at which repetitions end, for DRY."""
    vocabulary = _vocabulary(tokenizer, width)
    heads: dict[tuple[int, ...], set[int]] = {}
    for text in texts:
        whole = {id for id, token in enumerate(vocabulary) if text in token}
        heads.setdefault((), set()).update(whole)
        for cut in range(1, len(text)):
            begins = {id for id, token in enumerate(vocabulary) if token.endswith(text[:cut])}
            if begins - whole:
                tail = _ids(tokenizer, text[cut:])
                heads.setdefault(tail, set()).update(begins - whole)
    return SequenceBreakers.of({tail: sorted(ids) for tail, ids in heads.items()}, width)


@lru_cache(maxsize=2)
def _vocabulary(tokenizer: Any, width: int) -> list[str]:
    """Text of every token id that the model knows."""
    texts = TokenTexts(tokenizer)
    return [texts(id)[0] for id in range(width)]


def _ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))
