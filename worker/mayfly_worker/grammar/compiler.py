"""Compiles grammars for constrained output, and follows each sequence's output in its grammar."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from threading import Lock
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from mayfly_protocol.requests import ChatPrompt, Constraint
from mayfly_worker.grammar.schema_errors import endless_definition, locate_error
from mayfly_worker.grammar.sources import (
    MAX_CHARACTERS,
    GrammarSource,
    Schema,
    call_headers,
    compact,
    constraint_grammar,
    message_rule,
    thought_rule,
    tool_call_grammar,
)
from mayfly_worker.request_errors import GrammarFailed, InvalidInput
from mayfly_worker.text.detokenize import hugging_face
from mayfly_worker.text.dialects.dialect import HEADER, NORMAL, REASONING
from mayfly_worker.text.dialects.registry import output_format

MAX_KEPT = 64
"""Number of compiled grammars that are kept for later requests."""

MAX_REASON_CHARACTERS = 500
"""Longest error text about a grammar, in characters: some errors of llguidance quote all of a
regular expression."""

TRIAL_TOKENS = 4
"""Number of tokens for which a grammar is followed, as a trial, before it is accepted: only then
does a grammar that nests repetitions show that it needs more states than llguidance makes."""

# llguidance's own bound, four times as high, lets an expression such as (a{1000}){1000} take
# seconds, and no text of MAX_CHARACTERS needs more than this.
_LIMITS = LLParserLimits(initial_lexer_fuel=MAX_CHARACTERS)

_EXPLANATIONS = {
    "lexer error: too many expressions": "it needs too many states; nest its repetitions less "
    "deeply, or let them repeat less often",
    "initial lexer configuration": "it is too large",
    "NoExtensionBias": "nothing can ever match it",
    "oneOf constraints": "oneOf is followed only where its alternatives plainly exclude each "
    "other (required members of different constants); use anyOf",
}


class GrammarCompiler:
    """Compiles grammars for one model's tokenizer, and keeps the grammars that were used last. Safe
    to use from several threads.

    With ``in_reasoning`` the prompt ends inside reasoning: the model may end the reasoning as it
    likes, and the grammar holds for the text after it. Without ``in_reasoning`` the model cannot
    begin to reason. ``in_answer`` says that the prompt ends inside the text of the answer. Where a
    model's answers have headers, the grammar begins with them, and the thought may be missing.
    """

    def __init__(self, tokenizer: Any, width: int) -> None:
        """``tokenizer`` is mlx-lm's ``TokenizerWrapper``, ``width`` the length of a row of
        logits."""
        self._tokenizer = tokenizer
        self._width = width
        self._guide = output_format(tokenizer).framing.guide
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[tuple[str, str], CompiledGrammar] = OrderedDict()
        self._lock = Lock()

    def compile(
        self, constraint: Constraint, *, in_reasoning: bool = False, in_answer: bool = False
    ) -> CompiledGrammar:
        """Compiles the grammar of a constraint on a request's output. ``in_reasoning`` says that
        the prompt ends inside reasoning, after which the grammar holds.

        Raises:
            InvalidInput: the constraint is malformed, impossible, or not supported by llguidance;
                the message names the place in the constraint.
        """
        before = self._before(in_reasoning=in_reasoning, in_answer=in_answer, call=False)
        return self._compiled(constraint_grammar(constraint), before)

    def tools(
        self, prompt: ChatPrompt, *, in_reasoning: bool = False, in_answer: bool = False
    ) -> CompiledGrammar:
        """Compiles the grammar of an answer that has to call tools, written as a JSON array of
        objects with ``name`` and ``arguments``, or as one message in a model's own framing.
        ``in_reasoning`` says that the prompt ends inside reasoning, after which the grammar holds.

        Raises:
            InvalidInput: the parameters of a tool are malformed, impossible, or not supported by
                llguidance.
        """
        headers = partial(call_headers, self._guide, self._lark) if self._guide else None
        before = self._before(in_reasoning=in_reasoning, in_answer=in_answer, call=True)
        return self._compiled(tool_call_grammar(prompt, headers), before)

    def _compiled(self, source: GrammarSource, before: str) -> CompiledGrammar:
        key = (source.text(), before)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        compiled = self._compile(source, before)
        with self._lock:
            self._kept[key] = compiled
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return compiled

    def _compile(self, source: GrammarSource, before: str) -> CompiledGrammar:
        vocabulary = self._llguidance()
        matcher = self._start(source.text())
        if matcher.is_error():
            raise InvalidInput(self._explained(source, _reason(matcher)), source.param)
        for name, schema in source.schemas:
            if (place := endless_definition(schema)) is not None:
                raise InvalidInput(
                    f"{name} cannot be met: {place} requires itself, without end", source.param
                )
        if error := _trial_error(matcher):
            raise InvalidInput(self._explained(source, error), source.param)
        if before:
            matcher = self._start(source.after(before).text())
        return CompiledGrammar(matcher, self._width, vocabulary.vocab_size)

    def _start(self, grammar: str) -> LLMatcher:
        """Returns a matcher at the beginning of a grammar, with its first mask computed; if the
        grammar cannot be followed, the matcher's ``is_error()`` is true."""
        matcher = LLMatcher(self._llguidance(), grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return matcher

    def _before(self, *, in_reasoning: bool, in_answer: bool, call: bool) -> str:
        """Returns the Lark rule ``thought`` of all that comes before the grammar's text; an empty
        text if nothing does."""
        if self._guide is not None:
            if in_answer and not call:
                return ""
            state = NORMAL if in_answer else REASONING if in_reasoning else HEADER
            return message_rule(self._guide, self._lark, state=state, call=call)
        if not in_reasoning:
            return ""
        thought = output_format(self._tokenizer).thought
        ends = thought.ends if thought else ()
        special = {}
        for mark in ends:
            ids = self._tokenizer.encode(mark, add_special_tokens=False)
            if any(self._llguidance().is_special_token(id) for id in ids):
                special[mark] = ids
        return thought_rule(ends, special)

    def _lark(self, text: str) -> str:
        """Returns a text as a part of a Lark rule, with its special tokens by their ids."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        special = self._llguidance().is_special_token
        parts = []
        for marked, group in groupby(ids, special):
            each = list(group)
            parts += (
                [f"<[{id}]>" for id in each]
                if marked
                else [json.dumps(self._tokenizer.decode(each))]
            )
        return " ".join(parts)

    def _explained(self, source: GrammarSource, error: str) -> str:
        for name, schema in source.schemas:
            if reason := self._schema_error(schema):
                place, reason = locate_error(schema, reason, self._schema_error)
                return f"{name} cannot be followed: at {place}: {reason}"
        return f"the grammar cannot be followed: {error}"

    def _schema_error(self, schema: Schema) -> str:
        part = {"name": "schema", "json_schema": compact(schema)}
        return _trial_error(self._start(json.dumps({"grammars": [part]})))

    def _llguidance(self) -> LLTokenizer:
        """Returns the model's tokenizer in llguidance's form; the first call converts the
        tokenizer, which takes a third of a second."""
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._convert()
        return self._vocabulary

    def _convert(self) -> LLTokenizer:
        inner = hugging_face(self._tokenizer)
        if not isinstance(inner, PreTrainedTokenizerFast):
            raise InvalidInput(
                "this model's tokenizer is written in Python, and grammars need one that is not",
                "response_format",
            )
        ends = sorted(id for id in self._tokenizer.eos_token_ids if id < self._width)
        if not ends:
            raise InvalidInput(
                "this model has no end token, and a grammar could not say when it is complete",
                "response_format",
            )
        # Some checkpoints have more tokens than logits; llguidance needs room for all of them.
        size = max(self._width, inner.backend_tokenizer.get_vocab_size(with_added_tokens=True))
        return from_tokenizer(inner, n_vocab=size, eos_token=ends)


class CompiledGrammar:
    """A compiled grammar. Each sequence whose output follows the grammar has its own
    :meth:`matcher`."""

    def __init__(self, matcher: LLMatcher, width: int, vocabulary: int) -> None:
        self._matcher = matcher
        self._width = width
        self._vocabulary = vocabulary

    def matcher(self) -> GrammarMatcher:
        """Returns a new matcher for one sequence: a copy, made in about a microsecond, that shares
        the states of the grammar that are computed so far."""
        return GrammarMatcher(self._matcher.deep_copy(), self._width, self._vocabulary)


class GrammarMatcher:
    """Position of one sequence's output in the grammar that the output follows."""

    __slots__ = ("_matcher", "_spare")

    def __init__(self, matcher: LLMatcher, width: int, vocabulary: int) -> None:
        self._matcher = matcher
        size = _word_count(vocabulary)
        self._spare = np.zeros(size, dtype=np.int32) if size != _word_count(width) else None

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Writes the token ids that may come next into ``mask``, which is contiguous, of shape
        [ceil(width / 32)]: bit ``id % 32`` of word ``id // 32``. At least one id is allowed: end
        tokens among others if the output is complete, and end tokens alone if nothing can be added
        to the output.

        Raises:
            GrammarFailed: llguidance has reached its limits in this grammar.
        """
        words = mask if self._spare is None else self._spare
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise GrammarFailed(_reason(self._matcher))
        if self._spare is not None:
            mask[:] = self._spare[: len(mask)]

    def consume(self, token: int) -> None:
        """Advances the position by one token.

        Raises:
            GrammarFailed: the grammar does not allow the token.
        """
        if not self._matcher.consume_token(token):
            raise GrammarFailed(_reason(self._matcher))

    def replay(self, tokens: Sequence[int]) -> None:
        """Advances the position by tokens that another worker generated.

        Raises:
            GrammarFailed: the grammar does not allow these tokens.
        """
        if not self._matcher.consume_tokens(list(tokens)):
            raise GrammarFailed(_reason(self._matcher))

    @property
    def finished(self) -> bool:
        """True if the output is complete and nothing but an end token can follow."""
        return bool(self._matcher.is_stopped())


def _word_count(bits: int) -> int:
    return (bits + 31) // 32


def _trial_error(initial: LLMatcher) -> str:
    """Follows a grammar from its beginning for a few tokens (``TRIAL_TOKENS``), as a trial; returns
    the error if the trial fails, else an empty string."""
    matcher = initial.deep_copy()
    for _ in range(TRIAL_TOKENS):
        if not matcher.is_error() and not matcher.is_stopped():
            matcher.consume_token(_first(matcher.compute_bitmask()))
    return _reason(matcher) if matcher.is_error() else ""


def _first(mask: bytes) -> int:
    """Returns the lowest token id that a mask with one bit for each id allows."""
    bits = int.from_bytes(mask, "little")
    return (bits & -bits).bit_length() - 1


def _reason(matcher: LLMatcher) -> str:
    """Returns the error text of an llguidance matcher without the dump of its state; an error whose
    words name things that a client cannot know is put in words of Mayfly's own."""
    reason = matcher.get_error().split("\n<state>")[0].strip()[:MAX_REASON_CHARACTERS]
    return next(
        (ours for theirs, ours in _EXPLANATIONS.items() if reason.startswith(theirs)), reason
    )
