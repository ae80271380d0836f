"""What crosses between the engine thread and the I/O thread: plain objects, no arrays.

::

    I/O thread  --- Start, Stop, Cancel, Shutdown --->  engine thread
    I/O thread  <-- Started, Prefilled, StepResult, Ended, Refused ---  engine thread

A *row* is one choice of one request, known by an integer that is never used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from mayfly_worker.engine.sampler import SequenceSampling

YOUNG_TOKENS = 8
RESERVED_TOKENS = 1024
"""So much of an answer is counted on before it is written."""


class Matcher(Protocol):
    """A grammar's position in one row's output. Either method raises GrammarFailed where the
    grammar meets its limits; that ends the row and no other."""

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Writes which ids may come next, bit ``id % 32`` of word ``id // 32``."""

    def consume(self, token: int) -> None:
        """Moves on by a token that :meth:`fill` allowed."""


@dataclass(slots=True)
class SequenceState:
    """One choice to generate.

    ``tokens`` is the prompt and whatever the choice had generated before (a continuation);
    ``generated`` counts the latter. ``max_tokens`` is the whole budget of the choice. Generating
    any of ``stop_ids`` ends the row.
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
    """What it had generated when it came to this worker."""

    def __post_init__(self) -> None:
        self.resumed = self.generated

    @property
    def young(self) -> bool:
        """Whether it is so new here that it may be what a fault is about."""
        return self.generated - self.resumed < YOUNG_TOKENS

    @property
    def expected(self) -> int:
        """Tokens of KV cache that this row is admitted for."""
        return len(self.tokens) + min(self.max_tokens - self.generated, RESERVED_TOKENS)


@dataclass(slots=True)
class Start:
    """Run a request: rows that share their whole prompt (``n`` choices), or a single row.

    ``boundaries`` are prompt lengths worth keeping in the prefix cache (the end of the system
    prompt) beside the end of the prompt, which is always kept.
    """

    key: str
    rows: list[SequenceState]
    boundaries: tuple[int, ...] = ()
    rid: str = ""


@dataclass(frozen=True, slots=True)
class Stop:
    """The text of a row is complete (a stop string): take the row out."""

    row: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody wants this request any more."""

    key: str


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End the engine thread."""


Command = Start | Stop | Cancel | Shutdown


@dataclass(frozen=True, slots=True)
class Started:
    """A request left the queue; ``cached`` of its prompt tokens came from the prefix cache, and
    ``total`` of them are to be in the cache before it draws."""

    key: str
    cached: int
    total: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    """``done`` of ``total`` prompt tokens of a request are in the cache."""

    key: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms: of the drawn token, and of the most likely ones with their ids."""

    chosen: float
    ids: Sequence[int]
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A row's next token. ``end`` is set on its last: ``stop`` for a stop id, ``length`` where
    the budget is used up."""

    row: int
    token: int
    end: Literal["stop", "length"] | None = None
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """All tokens of one step."""

    drawn: list[SampledToken] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SequenceFailed:
    """A row cannot go on, through nobody's fault but its request's."""

    row: int
    message: str


Event = Started | Prefilled | StepResult | SequenceFailed
