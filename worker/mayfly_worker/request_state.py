"""One request's life on this worker, without sockets or threads.

::

    PREPARING --> QUEUED --> RUNNING --> over
        |            |          |
        +--Rejected--+          +-- Finish, Failed or Handover

Exactly one terminal message leaves a session; the :class:`Session` says which, the desk sends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mayfly_protocol.serving import Delta, Progress, Submit, TokenLogprob, TopLogprob, Usage
from mayfly_worker.engine.sequence import YOUNG_TOKENS, Logprobs, SampledToken, Start
from mayfly_worker.prepare import Choice, Prepared

PROGRESS_INTERVAL_S = 1.0

TokenText = Callable[[int], tuple[str, bytes]]
"""The text and the bytes of a token id."""


@dataclass(slots=True)
class Session:
    """What the worker knows of one attempt at one request of one front end."""

    peer: bytes
    submit: Submit
    key: str
    prepared: Prepared | None = None
    started: bool = False
    cached: int = 0
    _choices: dict[int, Choice] = field(default_factory=dict)  # by row, those still running
    _completion: dict[int, int] = field(default_factory=dict)  # tokens by choice
    _reasoning: dict[int, int] = field(default_factory=dict)
    _progress_at: float = 0.0

    def accept(self, prepared: Prepared) -> list[Start]:
        """Takes what preparation made of the request; returns what the engine is to run."""
        self.prepared = prepared
        self._choices = {c.row.id: c for c in prepared.choices if c.ended is None}
        self._reasoning = {
            c.index: c.text.reasoning_tokens for c in prepared.choices if c.ended is not None
        }
        for index, ids in enumerate(self.submit.resume):
            self._completion[index] = len(ids)
        rows = [c.row for c in self._choices.values()]
        first, others = rows[: prepared.together], rows[prepared.together :]
        groups = [first, *([row] for row in others)]
        return [
            Start(self.key, group, prepared.boundaries, self.submit.rid)
            for group in groups
            if group
        ]

    def complete_already(self) -> list[Delta]:
        """The ends of choices that had got all their tokens elsewhere, but not their end, with
        what had been held back of their text."""
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
        """The prompt's text, before a choice's first token: a continuation has sent it before."""
        assert self.prepared is not None
        return "" if self._completion.get(choice) else self.prepared.echo

    @property
    def harmless(self) -> bool:
        """Whether it has drawn so many tokens here that it is not what the worker before died
        of. A choice that has ended no longer counts."""
        return self.prepared is not None and all(
            self._completion.get(choice.index, 0) - _resumed(self.submit, choice.index)
            >= YOUNG_TOKENS
            for choice in self._choices.values()
        )

    def start(self, cached: int) -> None:
        """The engine begins with a row, ``cached`` of whose tokens were in the prefix cache.

        The first row's prompt is what counts: choices that start one by one find what it left.
        """
        if not self.started and self.prepared is not None:
            self.cached = min(cached, self.prepared.prompt_tokens)
        self.started = True

    @property
    def rows(self) -> list[int]:
        """Rows that have not ended."""
        return list(self._choices)

    @property
    def over(self) -> bool:
        """Whether every choice has ended."""
        return self.prepared is not None and not self._choices

    def prefilled(self, done: int, total: int) -> Progress | None:
        """Progress for the front end, at most once a second."""
        now = time.monotonic()
        if now - self._progress_at < PROGRESS_INTERVAL_S:
            return None
        self._progress_at = now
        return Progress(self.submit.rid, self.submit.attempt, done, total)

    def drawn(self, token: SampledToken, text_of: TokenText) -> tuple[Delta | None, bool]:
        """A row's next token, as its client will see it; and whether the engine has to be told
        that the row is complete (a stop string, or enough tool calls).

        Tokens that the engine had drawn beyond the end of the text are dropped.
        """
        choice = self._choices.get(token.row)
        if choice is None:
            return None, False
        text, index = choice.text, choice.index
        at, echo = self._completion.get(index, 0), self._echo(index)
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
            logprobs=_logprobs(token, text_of),
            finish=finish,
            stop=text.stop if finish is not None else None,
        )
        return delta, finish is not None and token.end is None

    def usage(self) -> Usage:
        elsewhere = self.prepared.reasoning if self.prepared else 0
        return Usage(
            prompt_tokens=self.prepared.prompt_tokens if self.prepared else 0,
            completion_tokens=sum(self._completion.values()),
            cached_tokens=self.cached,
            reasoning_tokens=elsewhere + sum(self._reasoning.values()),
        )


def _resumed(submit: Submit, choice: int) -> int:
    """How many of a choice's tokens were drawn elsewhere."""
    return len(submit.resume[choice]) if choice < len(submit.resume) else 0


def _logprobs(token: SampledToken, text_of: TokenText) -> tuple[TokenLogprob, ...]:
    found: Logprobs | None = token.logprobs
    if found is None:
        return ()
    text, raw = text_of(token.token)
    top = tuple(
        TopLogprob(i, *text_of(i), value) for i, value in zip(found.ids, found.values, strict=True)
    )
    return (TokenLogprob(token.token, text, raw, found.chosen, top),)
