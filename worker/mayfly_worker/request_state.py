"""State of one request on this worker; uses neither sockets nor threads.

::

    PREPARING --> QUEUED --> RUNNING --> finished
        |            |          |
        +--Rejected--+          +-- Finish, Failed or Handover

Exactly one message (Rejected, Finish, Failed or Handover) ends each request; the request table
sends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mayfly_protocol.serving import Delta, Progress, Submit, TokenLogprob, TopLogprob, Usage
from mayfly_worker.engine.sequence import (
    YOUNG_TOKENS,
    Logprobs,
    PromptScored,
    SampledToken,
    Start,
)
from mayfly_worker.prepare import Choice, PreparedRequest

PROGRESS_INTERVAL_S = 1.0

TokenText = Callable[[int], tuple[str, bytes]]
"""Function that returns the text and the bytes of a token id."""


@dataclass(slots=True)
class RequestState:
    """State of one attempt: one try to run a request on this worker. ``peer`` is the ZeroMQ routing
    id of the front end that sent the request, ``key`` identifies the attempt on this worker."""

    peer: bytes
    submit: Submit
    key: str
    prepared: PreparedRequest | None = None
    started: bool = False
    cached: int = 0
    _choices: dict[int, Choice] = field(default_factory=dict)  # running, by sequence id
    _completion: dict[int, int] = field(default_factory=dict)  # tokens by choice
    _reasoning: dict[int, int] = field(default_factory=dict)
    _scores: dict[int, list[Logprobs]] = field(default_factory=dict)
    """Log-probabilities of the prompt's tokens from the second on, by sequence id. Sequences of one
    prefill share a list."""
    _progress_at: float = 0.0

    def accept(self, prepared: PreparedRequest) -> list[Start]:
        """Stores the prepared request; returns the engine commands that start its sequences."""
        self.prepared = prepared
        self._choices = {c.sequence.id: c for c in prepared.choices if c.ended is None}
        self._reasoning = {
            c.index: c.text.reasoning_tokens for c in prepared.choices if c.ended is not None
        }
        for index, ids in enumerate(self.submit.resume):
            self._completion[index] = len(ids)
        sequences = [c.sequence for c in self._choices.values()]
        for sequence in sequences:
            sequence.suspect = self.submit.suspect
        first, others = sequences[: prepared.together], sequences[prepared.together :]
        groups = [first, *([sequence] for sequence in others)]
        for group in [sequences] if self._only_scored else groups:
            scores: list[Logprobs] = []
            self._scores |= {sequence.id: scores for sequence in group}
        if self._only_scored:
            groups = [sequences[:1]]
        return [
            Start(self.key, group, prepared.boundaries, self.submit.rid, prepared.prompt_logprobs)
            for group in groups
            if group
        ]

    def deltas_of_complete_choices(self) -> list[Delta]:
        """Returns the last deltas of choices that are complete before this worker generates
        anything: the worker that ran the request before had sent all tokens of such a choice, but
        not its end. Each delta has the finish reason and the text that was held back."""
        assert self.prepared is not None
        return [
            Delta(
                self.submit.rid,
                self.submit.attempt,
                choice.index,
                self._completion.get(choice.index, 0),
                text=self._echo(choice.index) + choice.ended.text,
                reasoning=choice.ended.reasoning,
                tool_calls=choice.ended.tool_calls,
                finish=choice.ended.finish,
                stop=choice.text.stop,
            )
            for choice in self.prepared.choices
            if choice.ended is not None
        ]

    def _echo(self, choice: int) -> str:
        """Returns the prompt's text if the client asked for it (``echo``) before the first token of
        a choice; empty otherwise, and for a choice that another worker began, since that worker has
        sent the text."""
        assert self.prepared is not None
        return "" if self._completion.get(choice) else self.prepared.echo

    @property
    def _only_scored(self) -> bool:
        """True if no token is to be generated: the request ends when its prompt is scored."""
        return any(not choice.sequence.max_tokens for choice in self._choices.values())

    def add_scores(self, scored: PromptScored, text_of: TokenText) -> list[Delta]:
        """Takes the log-probabilities of the next tokens of the prompt. Returns the last deltas of
        all choices if these were the last tokens and none is to be generated."""
        assert self.prepared is not None
        found = self._scores[scored.row]
        found += scored.logprobs
        if not self._only_scored or len(found) + 1 < self.prepared.prompt_tokens:
            return []
        ended, self._choices = self._choices, {}
        return [
            Delta(
                self.submit.rid,
                self.submit.attempt,
                choice.index,
                0,
                text=self._echo(choice.index),
                finish="length",
                prompt_logprobs=self._prompt_logprobs(choice, text_of),
            )
            for choice in ended.values()
        ]

    def _prompt_logprobs(self, choice: Choice, text_of: TokenText) -> tuple[TokenLogprob, ...]:
        """Returns the log-probabilities of the prompt's tokens before the first token of a choice,
        as :meth:`_echo` returns their text; empty if the client did not ask for them."""
        assert self.prepared is not None
        if self._completion.get(choice.index) or self.prepared.prompt_logprobs is None:
            return ()
        tokens = choice.sequence.tokens[: self.prepared.prompt_tokens]
        first = TokenLogprob(tokens[0], *text_of(tokens[0]), None)
        scored = zip(tokens[1:], self._scores[choice.sequence.id], strict=True)
        return (first, *(_logprob(token, found, text_of) for token, found in scored))

    @property
    def harmless(self) -> bool:
        """True once every running choice has generated so many tokens on this worker (YOUNG_TOKENS)
        that the request is not suspected any more to have crashed the worker on which it ran
        before."""
        return self.prepared is not None and all(
            self._completion.get(choice.index, 0) - _resumed_tokens(self.submit, choice.index)
            >= YOUNG_TOKENS
            for choice in self._choices.values()
        )

    def start(self, cached: int) -> None:
        """Records that the engine has started a sequence of this request, of whose tokens
        ``cached`` were found in the prefix cache.

        Only the count of the first sequence is kept: choices that start later find the request's
        own prompt in the cache.
        """
        if not self.started and self.prepared is not None:
            self.cached = min(cached, self.prepared.prompt_tokens)
        self.started = True

    @property
    def sequence_ids(self) -> list[int]:
        """The engine's ids of this request's sequences that have not ended."""
        return list(self._choices)

    @property
    def finished(self) -> bool:
        """True once every choice of this request has ended."""
        return self.prepared is not None and not self._choices

    def progress(self, done: int, total: int) -> Progress | None:
        """Returns a progress message for the client: ``done`` of ``total`` prompt tokens are
        prefilled. None if less than a second has passed since the last such message."""
        now = time.monotonic()
        if now - self._progress_at < PROGRESS_INTERVAL_S:
            return None
        self._progress_at = now
        return Progress(self.submit.rid, self.submit.attempt, done, total)

    def add_token(self, token: SampledToken, text_of: TokenText) -> tuple[Delta | None, bool]:
        """Takes the next token of one of this request's sequences. Returns the delta for the
        client, and True if the text ended the sequence (a stop string, or enough tool calls), so
        that the engine has to be told to stop this sequence.

        A token that the engine had sampled beyond the end of the text gives no delta (None).
        """
        choice = self._choices.get(token.row)
        if choice is None:
            return None, False
        text, index = choice.text, choice.index
        at, echo = self._completion.get(index, 0), self._echo(index)
        prompt_logprobs = self._prompt_logprobs(choice, text_of)
        piece = text.feed(token.token, eos=token.end == "stop")
        finish = piece.finish
        if finish is None and token.end is not None:
            last = text.end(token.end)
            piece, finish = piece.joined(last), last.finish
        self._completion[index] = at + 1
        if finish is not None:
            self._reasoning[index] = text.reasoning_tokens
            del self._choices[token.row]
        delta = Delta(
            rid=self.submit.rid,
            attempt=self.submit.attempt,
            choice=index,
            index=at,
            ids=(token.token,),
            text=echo + piece.text,
            reasoning=piece.reasoning,
            tool_calls=piece.tool_calls,
            logprobs=()
            if text.protocol or token.logprobs is None
            else (_logprob(token.token, token.logprobs, text_of),),
            finish=finish,
            stop=text.stop if finish is not None else None,
            prompt_logprobs=prompt_logprobs,
        )
        return delta, finish is not None and token.end is None

    def usage(self) -> Usage:
        """Returns the token counts of the whole request, including tokens that other workers
        generated before the request came to this worker."""
        elsewhere = self.prepared.reasoning if self.prepared else 0
        return Usage(
            prompt_tokens=self.prepared.prompt_tokens if self.prepared else 0,
            completion_tokens=sum(self._completion.values()),
            cached_tokens=self.cached,
            reasoning_tokens=elsewhere + sum(self._reasoning.values()),
        )


def _resumed_tokens(submit: Submit, choice: int) -> int:
    """Returns the number of tokens that other workers had generated of a choice before the request
    came to this worker."""
    return len(submit.resume[choice]) if choice < len(submit.resume) else 0


def _logprob(token: int, found: Logprobs, text_of: TokenText) -> TokenLogprob:
    top = tuple(
        TopLogprob(i, *text_of(i), value) for i, value in zip(found.ids, found.values, strict=True)
    )
    return TokenLogprob(token, *text_of(token), found.chosen, top, found.rank)
