"""Answers about the server itself."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from mayfly_protocol.counters import STATUS
from mayfly_protocol.roster import SlotState
from mayfly_server.api.schemas.base import Answer


class Alive(Answer):
    status: Literal["ok"]


Reason = Annotated[
    str | None, Field(description="Not for a caller who lacks a key that others need.")
]


class Ready(Answer):
    status: Annotated[
        Literal["ok", "stalled"],
        Field(
            description="Stalled: the workers of a model have something to do and have not moved "
            "for seconds. Requests are taken, and answered by the next workers if these are lost."
        ),
    ]
    reason: Reason = None


class NotReady(Answer):
    status: Literal["unavailable"]
    reason: Reason = None


class ServedModel(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: Annotated[
        int | None, Field(description="The context in tokens; null until the model is loaded.")
    ]


class ServedModels(Answer):
    object: Literal["list"]
    data: list[ServedModel]


# A field for every counter that the status shows.
_StatusCounters: Any = create_model(
    "_StatusCounters",
    __base__=Answer,
    **{name: (int, Field(description=text)) for name, text in STATUS.items()},  # type: ignore[call-overload]
)


class SlotStatus(_StatusCounters):
    """Sizes are bytes, times seconds."""

    slot: str
    model: str
    state: SlotState
    incarnation: int
    pid: int
    rows: Annotated[int, Field(description="How many may run at once; 0 until it is known.")]
    phase: str
    load_done: int
    load_total: int
    footprint: int
    age_s: float
    retry_in_s: float | None
    detail: str
    trial: Annotated[bool, Field(description="It gets one request at a time, until it has held.")]


class LossStatus(Answer):
    """A worker that was lost within the last minute."""

    slot: str
    incarnation: int
    kind: str
    scope: str
    first_cause: str
    age_s: float


class AutopsyStatus(Answer):
    """What is on record of one of the last workers that were lost."""

    id: str
    slot: str
    model: str
    incarnation: int
    pid: int
    kind: str
    scope: str
    first_cause: str
    meaning: str
    advice: str
    phase: str
    inferences: int
    running: int
    lived_s: float
    done: str
    age_s: float


class NodeStatus(Answer):
    node: str
    pid: int
    epoch: str
    protocol: Annotated[str, Field(description="The version of the wire that it speaks.")]
    silent: Annotated[bool, Field(description="Nothing was heard of it lately.")]
    refused: Annotated[
        dict[str, int], Field(description="What peers were refused at its sockets, by reason.")
    ]
    slots: list[SlotStatus]
    losses: list[LossStatus]
    autopsies: list[AutopsyStatus]


class Status(Answer):
    nodes: list[NodeStatus]
