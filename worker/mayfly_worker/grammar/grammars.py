"""Compiled grammars, and where each row's output has got to in its own."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from mayfly_protocol.requests import ChatPrompt, Constraint
from mayfly_worker.errors import GrammarFailed, InvalidRequest
from mayfly_worker.grammar.schemas import endless, find_fault
from mayfly_worker.grammar.sources import (
    MAX_CHARACTERS,
    Schema,
    Source,
    compact,
    of_constraint,
    of_tools,
    thought,
)
from mayfly_worker.text.detokenize import hugging_face

KEPT = 64
"""Compiled grammars that are kept for requests to come."""

MAX_REASON = 500
"""Characters of an error: some quote the whole expression that they are about."""

TRIED = 4
"""Tokens that a grammar is followed for before it is taken: one that repeats repetitions shows
only there that it needs more states than llguidance makes."""

# Its own bound, four times as high, lets an expression such as (a{1000}){1000} take seconds, and
# no text of MAX_CHARACTERS needs more than this.
_LIMITS = LLParserLimits(initial_lexer_fuel=MAX_CHARACTERS)

_WORDS = {
    "lexer error: too many expressions": "it needs too many states; nest its repetitions less "
    "deeply, or let them repeat less often",
    "initial lexer configuration": "it is too large",
    "NoExtensionBias": "nothing can ever match it",
    "oneOf constraints": "oneOf is followed only where its alternatives plainly exclude each "
    "other (required members of different constants); use anyOf",
}


class Grammars:
    """Compiles grammars for one model, and keeps the last of them. Safe to use from several
    threads.

    With ``in_reasoning`` the prompt has left a thought open: the model may end it as it likes, and
    the grammar holds from there on. A model that would open one itself is not let to.
    """

    def __init__(self, tokenizer: Any, width: int) -> None:
        """``tokenizer`` is mlx-lm's ``TokenizerWrapper``, ``width`` that of the logits."""
        self._tokenizer = tokenizer
        self._width = width
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[tuple[str, bool], Compiled] = OrderedDict()
        self._lock = Lock()

    def compile(self, constraint: Constraint, *, in_reasoning: bool = False) -> Compiled:
        """The grammar of a constraint.

        Raises:
            InvalidRequest: malformed, impossible, or beyond llguidance; the message says where.
        """
        return self._compiled(of_constraint(constraint), in_reasoning)

    def tools(self, prompt: ChatPrompt, *, in_reasoning: bool = False) -> Compiled:
        """The grammar of an answer that has to call tools, in the form that ``ChoiceText`` reads.

        Raises:
            InvalidRequest: as :meth:`compile`, for the parameters of a tool.
        """
        return self._compiled(of_tools(prompt), in_reasoning)

    def _compiled(self, source: Source, in_reasoning: bool) -> Compiled:
        key = (source.text(), in_reasoning)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        compiled = self._compile(source, in_reasoning)
        with self._lock:
            self._kept[key] = compiled
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return compiled

    def _compile(self, source: Source, in_reasoning: bool) -> Compiled:
        vocabulary = self._llguidance()
        matcher = self._begin(source.text())
        if matcher.is_error():
            raise InvalidRequest(self._explained(source, _reason(matcher)), source.param)
        for name, schema in source.schemas:
            if (place := endless(schema)) is not None:
                raise InvalidRequest(
                    f"{name} cannot be met: {place} requires itself, without end", source.param
                )
        if fault := _fault(matcher):
            raise InvalidRequest(self._explained(source, fault), source.param)
        if in_reasoning:
            matcher = self._begin(source.after(self._thought(vocabulary)).text())
        return Compiled(matcher, self._width, vocabulary.vocab_size)

    def _begin(self, grammar: str) -> LLMatcher:
        """A matcher that has made its first mask, where it could (``is_error``)."""
        matcher = LLMatcher(self._llguidance(), grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return matcher

    def _thought(self, vocabulary: LLTokenizer) -> str:
        ids = self._tokenizer.think_end_tokens
        special = any(vocabulary.is_special_token(id) for id in ids)
        return thought(self._tokenizer.think_end, ids, special)

    def _explained(self, source: Source, fault: str) -> str:
        for name, schema in source.schemas:
            if reason := self._schema_fault(schema):
                place, reason = find_fault(schema, reason, self._schema_fault)
                return f"{name} cannot be followed: at {place}: {reason}"
        return f"the grammar cannot be followed: {fault}"

    def _schema_fault(self, schema: Schema) -> str:
        part = {"name": "schema", "json_schema": compact(schema)}
        return _fault(self._begin(json.dumps({"grammars": [part]})))

    def _llguidance(self) -> LLTokenizer:
        """The tokenizer as llguidance has it: a third of a second of work, done once, on demand."""
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._convert()
        return self._vocabulary

    def _convert(self) -> LLTokenizer:
        inner = hugging_face(self._tokenizer)
        if not isinstance(inner, PreTrainedTokenizerFast):
            raise InvalidRequest(
                "this model's tokenizer is written in Python, and grammars need one that is not",
                "response_format",
            )
        ends = sorted(id for id in self._tokenizer.eos_token_ids if id < self._width)
        if not ends:
            raise InvalidRequest(
                "this model has no end token, and a grammar could not say when it is complete",
                "response_format",
            )
        # Some checkpoints have more tokens than logits; llguidance needs room for all of them.
        size = max(self._width, inner.backend_tokenizer.get_vocab_size(with_added_tokens=True))
        return from_tokenizer(inner, n_vocab=size, eos_token=ends)


class Compiled:
    """A grammar at its beginning; every row that follows it takes a :meth:`matcher`."""

    def __init__(self, matcher: LLMatcher, width: int, vocabulary: int) -> None:
        self._matcher = matcher
        self._width = width
        self._vocabulary = vocabulary

    def matcher(self) -> Matcher:
        """A copy, about a microsecond; what was worked out for one serves the others."""
        return Matcher(self._matcher.deep_copy(), self._width, self._vocabulary)


class Matcher:
    """A grammar's position in one row's output."""

    __slots__ = ("_matcher", "_spare")

    def __init__(self, matcher: LLMatcher, width: int, vocabulary: int) -> None:
        self._matcher = matcher
        words = _words(vocabulary)
        self._spare = np.zeros(words, dtype=np.int32) if words != _words(width) else None

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Writes which ids may come next into ``mask``, shape [ceil(width / 32)], contiguous: bit
        ``id % 32`` of word ``id // 32``. End tokens are among them where the output is complete,
        and alone where nothing can be added to it. There is always one.

        Raises:
            GrammarFailed: llguidance has met its limits in this grammar.
        """
        row = mask if self._spare is None else self._spare
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            raise GrammarFailed(_reason(self._matcher))
        if self._spare is not None:
            mask[:] = self._spare[: len(mask)]

    def consume(self, token: int) -> None:
        """Goes on by a token.

        Raises:
            GrammarFailed: the grammar does not allow it.
        """
        if not self._matcher.consume_token(token):
            raise GrammarFailed(_reason(self._matcher))

    def replay(self, tokens: Sequence[int]) -> None:
        """Goes on by many tokens: those that another worker had generated.

        Raises:
            GrammarFailed: the grammar does not allow them.
        """
        if not self._matcher.consume_tokens(list(tokens)):
            raise GrammarFailed(_reason(self._matcher))

    @property
    def finished(self) -> bool:
        """Whether the output is complete and nothing but an end token can follow."""
        return bool(self._matcher.is_stopped())


def _words(bits: int) -> int:
    return (bits + 31) // 32


def _fault(begun: LLMatcher) -> str:
    """Why the grammar of a matcher at its beginning cannot be followed: not at all, or not for
    ``TRIED`` tokens. Empty where it can."""
    matcher = begun.deep_copy()
    for _ in range(TRIED):
        if not matcher.is_error() and not matcher.is_stopped():
            matcher.consume_token(_first(matcher.compute_bitmask()))
    return _reason(matcher) if matcher.is_error() else ""


def _first(mask: bytes) -> int:
    """The lowest id that a mask, a bit for each, allows."""
    bits = int.from_bytes(mask, "little")
    return (bits & -bits).bit_length() - 1


def _reason(matcher: LLMatcher) -> str:
    """llguidance's error without the dump of its state, and in words of ours where its own speak
    of things that a client cannot know."""
    reason = matcher.get_error().split("\n<state>")[0].strip()[:MAX_REASON]
    return next((ours for theirs, ours in _WORDS.items() if reason.startswith(theirs)), reason)
