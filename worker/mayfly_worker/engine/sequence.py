"""Sequences, and the commands and events that the engine exchanges with other threads.

::

    main thread  --- Start, Stop, CancelCommand ------------------->  engine thread
    main thread  <-- Started, Prefilled, StepResult, SequenceFailed --  engine thread

All of them are plain objects without arrays. A *sequence* is one choice of one request, identified
by an integer that is never used again; while it runs it is one row of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from mayfly_worker.engine.sampler import SequenceSampling

YOUNG_TOKENS = 8
"""Tokens after which a sequence is no longer a suspect for a fault of a decode step."""
RESERVED_TOKENS = 1024
"""Tokens of an answer for which memory is reserved when its request is admitted."""


class Matcher(Protocol):
    """A grammar's position in the output of one sequence.

    Both methods raise GrammarFailed where the grammar reaches its limits, which ends that sequence
    and no other.
    """

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Sets bit ``id % 32`` of word ``id // 32`` for every id that may come next."""

    def consume(self, token: int) -> None:
        """Advances by a token that :meth:`fill` allowed."""


@dataclass(slots=True)
class SequenceState:
    """One choice to generate.

    ``tokens`` are the prompt and the tokens generated so far, by earlier workers too; ``generated``
    counts the latter. ``max_tokens`` is the budget of the whole choice. Generating any of
    ``stop_ids`` ends the sequence.
    """

    id: int
    tokens: list[int]
    sampling: SequenceSampling
    max_tokens: int
    generated: int = 0
    stop_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    matcher: Matcher | None = None
    resumed: int = field(init=False)
    """Tokens that earlier workers had generated."""

    def __post_init__(self) -> None:
        self.resumed = self.generated

    @property
    def young(self) -> bool:
        """True while the sequence is so new on this worker that it may be the cause of a fault."""
        return self.generated - self.resumed < YOUNG_TOKENS

    @property
    def expected(self) -> int:
        """Tokens of KV cache that this sequence is admitted for."""
        return len(self.tokens) + min(self.max_tokens - self.generated, RESERVED_TOKENS)


@dataclass(slots=True)
class Start:
    """Command to run a request: one sequence, or several with the same prompt (``n`` choices).

    ``boundaries`` are prompt lengths at which the state is kept in the prefix cache, such as the
    end of the system prompt. The end of the prompt is always kept.
    """

    key: str
    rows: list[SequenceState]
    boundaries: tuple[int, ...] = ()
    rid: str = ""


@dataclass(frozen=True, slots=True)
class Stop:
    """Command to remove a sequence whose text is complete (a stop string was found)."""

    row: int


@dataclass(frozen=True, slots=True)
class CancelCommand:
    """Command to drop a request whose client is gone."""

    key: str


Command = Start | Stop | CancelCommand


@dataclass(frozen=True, slots=True)
class Started:
    """Event: a request left the queue.

    ``cached`` of its prompt tokens came from the prefix cache; ``total`` have to be in the KV cache
    before the first token is sampled.
    """

    key: str
    cached: int
    total: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Event: ``done`` of ``total`` prompt tokens of a request are in the KV cache."""

    key: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities (natural) of the sampled token and of the most likely tokens, with ids."""

    chosen: float
    ids: Sequence[int]
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The next token of a sequence.

    ``end`` is set on the last one: ``stop`` for a stop id, ``length`` where the budget is used up.
    """

    row: int
    token: int
    end: Literal["stop", "length"] | None = None
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Event: all tokens of one decode step."""

    tokens: list[SampledToken] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SequenceFailed:
    """Event: a sequence cannot go on because of its own request, such as its grammar."""

    row: int
    message: str


Event = Started | Prefilled | StepResult | SequenceFailed
