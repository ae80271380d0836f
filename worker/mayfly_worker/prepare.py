"""Prepares requests for the engine, and answers Tokenize and Detokenize messages (*inquiries*).

A submitted request becomes sequences that the engine can run: its chat template is rendered, its
prompt tokenized, its grammar compiled. Preparation takes from microseconds to a second, so it runs
in a small thread pool while the tokens of other requests keep flowing.

An inquiry asks for the tokens of a prompt, or for the text of tokens: it needs the loaded model's
tokenizer, but no forward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import structlog

from mayfly_protocol.requests import (
    ChatPrompt,
    Ending,
    Generation,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from mayfly_protocol.serving import Detokenize, Detokenized, Inquiry, Submit, Tokenize, Tokenized
from mayfly_protocol.transport.sockets import MAX_FRAME_BYTES
from mayfly_worker.engine.admission import Budget
from mayfly_worker.engine.sampler import SequenceSampling
from mayfly_worker.engine.sequence import SequenceState
from mayfly_worker.grammar.compiler import CompiledGrammar, GrammarCompiler
from mayfly_worker.model.generation_config import completed
from mayfly_worker.model.loading import LoadedModel
from mayfly_worker.request_errors import InvalidInput
from mayfly_worker.text.choice import ChoiceText, TextPiece
from mayfly_worker.text.prompts import RenderedPrompt, check_ids, param_of, render, token_budget
from mayfly_worker.text.word_tokens import bad_sequences, sequence_breakers

THREADS = 2
MAX_ANSWER_BYTES = MAX_FRAME_BYTES // 2
"""Longest answer to a Tokenize or Detokenize message, in bytes. A ZeroMQ frame over the limit of
MAX_FRAME_BYTES would cut the connection to the front end that asked, and so end its other requests,
too."""
MAX_SCORES = 200_000
"""Most log-probabilities of prompt tokens in an answer: some 10 MB on their way to the client."""
_ID_BYTES = 5
"""Largest number of bytes that one token id takes in a message (a MessagePack integer)."""
UNLIMITED = 1 << 30
"""Context length, in tokens, that is assumed of a model whose configuration names none."""

_log = structlog.get_logger()


@dataclass(slots=True)
class Choice:
    """One choice of a prepared request: its sequence for the engine, and the text of its tokens.
    ``ended`` is set if a choice that another worker began turns out to be complete: ``ended`` is
    then its last piece of text, with the finish reason and the text that was held back."""

    index: int
    sequence: SequenceState
    text: ChoiceText
    ended: TextPiece | None = None


@dataclass(slots=True)
class PreparedRequest:
    """A request that the engine can run. ``boundaries`` are prompt lengths at which the KV state is
    stored in the prefix cache. ``together`` choices start at once, from one prefill, since the
    memory budget has room for them; each of the other choices starts when there is room for it.
    ``echo`` is the prompt's text, sent before a choice's first token if the client asked for it;
    ``prompt_logprobs`` is the number of alternatives if the prompt's tokens are to be scored.
    ``reasoning`` counts the reasoning tokens of choices that ended on another worker and are not
    run again. ``prompt_ids`` are the prompt's tokens if the client asked for them."""

    submit: Submit
    prompt_tokens: int
    boundaries: tuple[int, ...]
    choices: list[Choice]
    together: int = 1
    echo: str = ""
    reasoning: int = 0
    prompt_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None


class Preparer:
    """Checks and prepares requests for one loaded model. Safe to use from several threads."""

    def __init__(self, loaded: LoadedModel, budget: Budget, sequence_ids: Iterator[int]) -> None:
        self._loaded = loaded
        self._budget = budget
        self._sequence_ids = sequence_ids
        self._grammars = GrammarCompiler(loaded.tokenizer, loaded.probe.width)
        self._eos = frozenset(loaded.tokenizer.eos_token_ids)

    def prepare(self, submit: Submit) -> PreparedRequest:
        """Makes a request ready for the engine. Raises InvalidInput, naming the parameter, if the
        request asks for anything that this model cannot do."""
        generation = submit.generation
        width = self._loaded.probe.width
        check_ids([i for i, _ in generation.sampling.logit_bias], width, "logit_bias")
        check_ids(generation.ending.stop_token_ids, width, "stop_token_ids")
        check_ids(generation.sampling.allowed_ids, width, "allowed_token_ids")
        rendered = self._cut(generation, render(generation.prompt, self._loaded.tokenizer, width))
        budget = token_budget(
            len(rendered.ids),
            generation.ending.max_tokens,
            self._loaded.card.context or UNLIMITED,
            param_of(generation.prompt),
        )
        grammar = self._grammar(generation, rendered)
        sampling = self._sampling(generation, grammar)
        # A choice that has begun has had its prompt's scores.
        scores = None if any(submit.resume) else generation.output.prompt_logprobs
        _check_scores(len(rendered.ids), generation)
        choices = [
            self._choice(submit, index, rendered, budget, grammar, sampling)
            for index in range(generation.n)
            if index not in submit.finished
        ]
        return PreparedRequest(
            submit,
            len(rendered.ids),
            (rendered.system_tokens,) if rendered.system_tokens else (),
            choices,
            together=self._together([choice.sequence for choice in choices]),
            echo=self._echo(generation.prompt) if generation.output.echo else "",
            reasoning=self._earlier_reasoning_tokens(submit, rendered)
            if generation.output.split
            else 0,
            prompt_ids=tuple(rendered.ids) if generation.output.prompt_ids else (),
            prompt_logprobs=scores,
        )

    def _cut(self, generation: Generation, rendered: RenderedPrompt) -> RenderedPrompt:
        """Returns the last tokens of a prompt that is longer than the request wants it to be."""
        limit = generation.prompt_limit
        if limit == -1:
            room = generation.ending.max_tokens
            limit = max(1, (self._loaded.card.context or UNLIMITED) - (1 if room is None else room))
        if limit is None or len(rendered.ids) <= limit:
            return rendered
        return RenderedPrompt(rendered.ids[-limit:], in_reasoning=rendered.in_reasoning)

    def _sampling(
        self, generation: Generation, grammar: CompiledGrammar | None
    ) -> SequenceSampling:
        """Returns the sampling parameters of the request's choices, with the ids of the texts that
        it names. Raises InvalidInput if they leave no token that may be sampled."""
        tokenizer, width = self._loaded.tokenizer, self._loaded.probe.width
        sampling = completed(generation.sampling, self._loaded.card.sampling)
        ending = generation.ending
        # A finished grammar allows end tokens alone; to ban them would leave nothing.
        banned = () if grammar else tuple(sorted(self._stop_ids(ending)))
        words = bad_sequences(sampling.bad_words, tokenizer, width)
        never = {word[-1] for word in words} | set(banned if ending.min_tokens else ())
        if words or sampling.allowed_ids:
            allowed = set(sampling.allowed_ids) or range(width)
            if all(id in never for id in allowed):
                raise InvalidInput(
                    "bad_words and min_tokens forbid every token that allowed_token_ids allows",
                    "allowed_token_ids" if sampling.allowed_ids else "bad_words",
                )
        return SequenceSampling(
            sampling,
            banned=banned,
            banned_until=ending.min_tokens,
            bad_words=words,
            breakers=sequence_breakers(sampling.dry.breakers, tokenizer, width)
            if sampling.dry is not None
            else None,
            kept_by_xtc=self._kept_by_xtc if sampling.xtc_probability > 0 else (),
        )

    @cached_property
    def _kept_by_xtc(self) -> tuple[int, ...]:
        """The ids that XTC never leaves out, as in mlx-lm: line ends and end tokens."""
        line_end = self._loaded.tokenizer.encode("\n", add_special_tokens=False)
        width = self._loaded.probe.width
        return tuple(id for id in {*line_end, *self._eos} if 0 <= id < width)

    def _stop_ids(self, ending: Ending) -> frozenset[int]:
        own = frozenset(ending.stop_token_ids)
        return own if ending.ignore_eos else own | self._eos

    def _earlier_reasoning_tokens(self, submit: Submit, rendered: RenderedPrompt) -> int:
        total = 0
        for index in submit.finished:
            text = self._text(submit, index, rendered)
            text.replay(_resumed_ids(submit, index))
            total += text.reasoning_tokens
        return total

    def _text(self, submit: Submit, index: int, rendered: RenderedPrompt) -> ChoiceText:
        return ChoiceText(
            submit.generation, self._loaded.tokenizer, rendered, rid=submit.rid, choice=index
        )

    def _together(self, sequences: Sequence[SequenceState]) -> int:
        """Number of choices that may start at once from one prefill, since they fit into the memory
        budget together: at least 1, and 1 for choices that continue another worker's output, since
        they differ already and no prefill serves several of them."""
        if any(sequence.generated for sequence in sequences):
            return 1
        return max(1, self._budget.rows_at(max((s.expected for s in sequences), default=0)))

    def _echo(self, prompt: Prompt) -> str:
        match prompt:
            case TextPrompt(text):
                return text
            case TokenPrompt(ids):
                decoded: str = self._loaded.tokenizer.decode(list(ids), skip_special_tokens=False)
                return decoded
            case _:
                return ""

    def _grammar(self, generation: Generation, rendered: RenderedPrompt) -> CompiledGrammar | None:
        prompt, constraint = generation.prompt, generation.output.constraint
        begun = {"in_reasoning": rendered.in_reasoning, "in_answer": rendered.in_answer}
        if isinstance(prompt, ChatPrompt) and prompt.tools and prompt.tool_choice == "required":
            return self._grammars.tools(prompt, **begun)
        if constraint is None:
            return None
        return self._grammars.compile(constraint, **begun)

    def _choice(
        self,
        submit: Submit,
        index: int,
        rendered: RenderedPrompt,
        max_tokens: int,
        grammar: CompiledGrammar | None,
        sampling: SequenceSampling,
    ) -> Choice:
        generation = submit.generation
        before = _resumed_ids(submit, index)
        text = self._text(submit, index, rendered)
        ended: TextPiece | None = None
        if (reason := text.replay(before)) is not None:
            ended = TextPiece(finish=reason)
        elif generation.output.prompt_logprobs is not None and not before and not max_tokens:
            pass  # it ends when its prompt is scored
        elif len(before) >= max_tokens:  # its last worker's context was larger
            ended = text.end("length")
        matcher: Any = None
        if grammar is not None:
            matcher = grammar.matcher()
            matcher.replay(before)
        sequence = SequenceState(
            id=next(self._sequence_ids),
            tokens=[*rendered.ids, *before],
            sampling=replace(sampling, choice=index),
            max_tokens=max_tokens,
            generated=len(before),
            stop_ids=self._stop_ids(generation.ending),
            logprobs=generation.output.logprobs,
            matcher=matcher,
        )
        return Choice(index, sequence, text, ended)


def _check_scores(prompt_tokens: int, generation: Generation) -> None:
    """Raises InvalidInput if the log-probabilities of a prompt's tokens are too many for one
    answer."""
    asked = generation.output.prompt_logprobs
    values = prompt_tokens * ((asked or 0) + 1) * generation.n
    if asked is not None and values > MAX_SCORES:
        raise InvalidInput(
            f"the log probabilities of {prompt_tokens} prompt tokens, with {asked} alternatives "
            f"each, in {generation.n} choices are {values} values, and at most {MAX_SCORES} fit "
            "into an answer; send a shorter prompt or ask for fewer",
            param_of(generation.prompt),
        )


@dataclass(frozen=True, slots=True)
class PreparationDone:
    """Outcome of the preparation of one request: the prepared request, or the exception that
    prevented it. ``key`` is the request's key in the request table."""

    key: str
    outcome: PreparedRequest | Exception


@dataclass(frozen=True, slots=True)
class InquiryDone:
    """Outcome of a Tokenize or Detokenize message (the ``inquiry``): the answer, or the exception
    that prevented it. ``peer`` is the ZeroMQ routing id of the front end that asked."""

    peer: bytes
    inquiry: Inquiry
    outcome: Tokenized | Detokenized | Exception


class PreparationPool:
    """Threads that prepare requests and answer Tokenize and Detokenize messages. The threads call
    ``post`` with each outcome, and log each exception other than InvalidInput."""

    def __init__(
        self,
        loaded: LoadedModel,
        budget: Budget,
        post: Callable[[PreparationDone | InquiryDone], None],
    ) -> None:
        self._loaded = loaded
        self._preparer = Preparer(loaded, budget, itertools.count())
        self._post = post
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prepare")

    def prepare(self, key: str, submit: Submit) -> None:
        """Prepares a request on a thread of the pool, which posts a PreparationDone when it has
        finished."""
        self._threads.submit(self._prepare, key, submit)

    def answer(self, peer: bytes, inquiry: Inquiry) -> None:
        """Answers a Tokenize or Detokenize message on a thread of the pool, which posts an
        InquiryDone when it has finished."""
        self._threads.submit(self._answer, peer, inquiry)

    def _prepare(self, key: str, submit: Submit) -> None:
        outcome: PreparedRequest | Exception
        try:
            outcome = self._preparer.prepare(submit)
        except Exception as error:
            if not isinstance(error, InvalidInput):
                _log.exception(
                    "a request could not be prepared for the engine: it ends with an error",
                    rid=submit.rid,
                )
            outcome = error
        self._post(PreparationDone(key, outcome))

    def _answer(self, peer: bytes, inquiry: Inquiry) -> None:
        outcome: Tokenized | Detokenized | Exception
        try:
            outcome = answer_inquiry(inquiry, self._loaded)
        except Exception as error:
            if not isinstance(error, InvalidInput):
                _log.exception(
                    "a request to tokenize or detokenize failed: its client gets an error",
                    rid=inquiry.rid,
                )
            outcome = error
        self._post(InquiryDone(peer, inquiry, outcome))


def _resumed_ids(submit: Submit, choice: int) -> list[int]:
    """Returns the token ids that other workers had generated of a choice before the request came to
    this worker."""
    return list(submit.resume[choice]) if choice < len(submit.resume) else []


def answer_inquiry(inquiry: Inquiry, loaded: LoadedModel) -> Tokenized | Detokenized:
    """Answers a Tokenize or Detokenize message. Safe to call from several threads.

    Raises:
        InvalidInput: an empty prompt, an id that does not exist, a conversation that the model's
            template refuses, or an answer of more than 32 MiB (:data:`MAX_ANSWER_BYTES`).
    """
    match inquiry:
        case Tokenize():
            ids = _ids(inquiry, loaded)
            shown = () if inquiry.count_only else tuple(ids)
            if _ID_BYTES * len(shown) > MAX_ANSWER_BYTES:
                param = param_of(inquiry.prompt)
                raise InvalidInput(f"{len(ids)} tokens are too many for one answer", param)
            return Tokenized(inquiry.rid, inquiry.attempt, len(ids), shown)
        case Detokenize(rid, attempt, ids=given):
            check_ids(given, loaded.probe.width, "tokens")
            text: str = loaded.tokenizer.decode(list(given), skip_special_tokens=False)
            if len(text.encode()) > MAX_ANSWER_BYTES:
                raise InvalidInput("the text of these tokens is too long for one answer", "tokens")
            return Detokenized(rid, attempt, text)


def _ids(inquiry: Tokenize, loaded: LoadedModel) -> list[int]:
    prompt = inquiry.prompt
    if isinstance(prompt, TextPrompt):
        if not prompt.text:
            raise InvalidInput("the prompt is empty: it has no tokens", "prompt")
        if not inquiry.special:
            found: list[int] = loaded.tokenizer.encode(prompt.text, add_special_tokens=False)
            return found
    return render(prompt, loaded.tokenizer, loaded.probe.width).ids
