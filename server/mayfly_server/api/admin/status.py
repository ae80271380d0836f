"""The routes ``GET /mayfly/status``, the state of every node and worker as this front end knows it,
and ``GET /mayfly/events``, which sends the status as a server-sent event whenever it changes.

Each event is the complete status, with the tokens per second of every worker, so a client that
reconnects is up to date with the first event. A front end that shuts down sends a last event with
``leaving`` true.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Hashable, Mapping
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter
from fastapi.responses import StreamingResponse
from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from mayfly_protocol import PROTOCOL_VERSION
from mayfly_protocol.capabilities import shown
from mayfly_protocol.counters import STATUS
from mayfly_protocol.faults import KINDS
from mayfly_protocol.roster import Autopsy, Loss, Roster, SlotState, SlotView
from mayfly_server.api.dependencies import FrontDep
from mayfly_server.api.openapi import AnswerObject, ModelCapabilities
from mayfly_server.dispatch.fleet import Fleet
from mayfly_server.http import sse

router = APIRouter()
events_router = APIRouter(include_in_schema=False)  # OpenAPI cannot describe an endless stream

RATE_WINDOW_S = 3.0
"""Seconds over which a worker's tokens per second are averaged. Workers report their token counts
every half second; a rate over a single half second would be noise."""
MIN_RATE_INTERVAL_S = 0.9
MIN_EVENT_INTERVAL_S = 0.1
MAX_EVENT_INTERVAL_S = 1.0

# One field for each of a worker's counters that the status shows.
_SlotCounters: Any = with_config(ConfigDict(extra="forbid"))(
    TypedDict(  # type: ignore[operator]
        "_SlotCounters",
        {name: Annotated[int, Field(description=help)] for name, help in STATUS.items()},
    )
)


class SlotStatus(_SlotCounters):  # type: ignore[misc]
    """A slot (a node's place for one worker process at a time) and its present worker. Sizes are in
    bytes, times in seconds."""

    slot: str
    model: str
    state: SlotState
    incarnation: int
    pid: int
    rows: Annotated[int, Field(description="Sequences that may run at once; 0 while unknown.")]
    capabilities: Annotated[
        ModelCapabilities | None,
        Field(description="The model's capabilities; null until the model is loaded."),
    ]
    phase: str
    load_done: int
    load_total: int
    footprint: int
    age_s: float
    retry_in_s: float | None
    detail: str
    trial: Annotated[
        bool,
        Field(
            description="True after earlier workers of the slot died one after the other: the "
            "worker gets what no other worker can take until it has run long enough."
        ),
    ]


class LossStatus(AnswerObject):
    """A worker process that crashed, hung or was killed within the last minute."""

    slot: str
    incarnation: int
    kind: str
    scope: str
    first_cause: str
    age_s: float


class AutopsyStatus(AnswerObject):
    """A summary of what killed one of the node's recent workers: kind of fault, evidence, advice,
    and what the worker did at its end."""

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


class NodeStatus(AnswerObject):
    node: str
    pid: int
    epoch: str
    protocol: Annotated[str, Field(description="The version of the node's wire protocol.")]
    silent: Annotated[
        bool, Field(description="True while the node's periodic status messages are overdue.")
    ]
    refused: Annotated[
        dict[str, int],
        Field(
            description="Number of connections and messages that the node's sockets refused, by "
            "reason."
        ),
    ]
    slots: list[SlotStatus]
    losses: list[LossStatus]
    autopsies: list[AutopsyStatus]


class Status(AnswerObject):
    nodes: list[NodeStatus]


@router.get("/mayfly/status", response_model=None, responses={200: {"model": Status}})
async def status(front: FrontDep) -> Status:
    """Lists every node with its slots, as in the node's last status message. (A slot is a node's
    place for one worker process at a time.)"""
    return fleet_status(front.fleet)


@events_router.get("/mayfly/events")
async def events(front: FrontDep) -> StreamingResponse:
    return StreamingResponse(_events(front.fleet), headers=sse.HEADERS)


def fleet_status(fleet: Fleet) -> Status:
    return {"nodes": [_node(roster, silent) for roster, silent in fleet.nodes()]}


def _node(roster: Roster, silent: bool) -> NodeStatus:
    return {
        "node": roster.node,
        "pid": roster.pid,
        "epoch": roster.epoch,
        "protocol": f"{PROTOCOL_VERSION}.{roster.minor}",
        "silent": silent,
        "refused": roster.refused,
        "slots": [_slot(view) for view in roster.slots],
        "losses": [_loss(loss) for loss in roster.losses],
        "autopsies": [_autopsy(autopsy) for autopsy in roster.autopsies],
    }


def _slot(view: SlotView) -> SlotStatus:
    return SlotStatus(
        slot=view.slot,
        model=view.model,
        state=view.state,
        incarnation=view.incarnation,
        pid=view.pid,
        rows=view.card.rows if view.card else 0,
        capabilities=shown(view.card) if view.card else None,
        **{name: getattr(view, name) for name in STATUS},
        phase=view.phase,
        load_done=view.load_done,
        load_total=view.load_total,
        footprint=view.memory.footprint,
        age_s=round(view.age_s, 3),
        retry_in_s=view.retry_in_s,
        detail=view.detail,
        trial=view.trial,
    )


def _loss(loss: Loss) -> LossStatus:
    return {
        "slot": loss.slot,
        "incarnation": loss.incarnation,
        "kind": loss.kind,
        "scope": loss.scope,
        "first_cause": loss.first_cause,
        "age_s": round(loss.age_s, 3),
    }


def _autopsy(autopsy: Autopsy) -> AutopsyStatus:
    """The record of a worker's death as JSON, with the meaning of its kind of fault and the advice
    to operators."""
    kind = KINDS.get(autopsy.kind)
    return {
        "id": autopsy.id,
        "slot": autopsy.slot,
        "model": autopsy.model,
        "incarnation": autopsy.incarnation,
        "pid": autopsy.pid,
        "kind": autopsy.kind,
        "scope": autopsy.scope,
        "first_cause": autopsy.first_cause,
        "meaning": kind.meaning if kind else "",
        "advice": kind.advice if kind else "",
        "phase": autopsy.phase,
        "inferences": autopsy.inferences,
        "running": autopsy.running,
        "lived_s": autopsy.lived_s,
        "done": autopsy.done,
        "age_s": round(autopsy.age_s, 3),
    }


Worker = TypeVar("Worker", bound=Hashable)


class Throughput:
    """Computes workers' tokens per second, each averaged over the last :data:`RATE_WINDOW_S`
    seconds (3 s)."""

    def __init__(self) -> None:
        self._samples: dict[Hashable, deque[tuple[float, int]]] = {}

    def update(self, totals: Mapping[Worker, int], now: float) -> dict[Worker, float | None]:
        """Takes the number of tokens that each worker has generated since its start, and returns
        each worker's tokens per second, or None for a worker whose samples span less than
        :data:`MIN_RATE_INTERVAL_S` seconds (0.9 s). ``now`` is in seconds on any monotonic clock.
        Forgets workers that are not in ``totals``."""
        self._samples = {worker: self._samples.get(worker, deque()) for worker in totals}
        rates: dict[Worker, float | None] = {}
        for worker, total in totals.items():
            samples = self._samples[worker]
            samples.append((now, total))
            while len(samples) > 2 and samples[1][0] <= now - RATE_WINDOW_S:
                samples.popleft()
            began, before = samples[0]
            elapsed = now - began
            rates[worker] = (total - before) / elapsed if elapsed >= MIN_RATE_INTERVAL_S else None
        return rates


async def _events(fleet: Fleet) -> AsyncIterator[str]:
    throughput = Throughput()
    while True:
        change = fleet.next_change
        yield sse.event(_live_status(fleet, throughput))
        if fleet.leaving:
            return
        await asyncio.sleep(MIN_EVENT_INTERVAL_S)
        await fleet.wait_for_change(MAX_EVENT_INTERVAL_S, since=change)


def _live_status(fleet: Fleet, throughput: Throughput) -> dict[str, Any]:
    """The fleet's status with two additions: ``tokens_per_s`` in every slot, and ``leaving``, true
    once the front end shuts down."""
    shown = fleet_status(fleet)
    workers: dict[Any, Any] = {
        (node["node"], node["epoch"], slot["slot"], slot["incarnation"]): slot
        for node in shown["nodes"]
        for slot in node["slots"]
    }
    generated = {worker: slot["generated_tokens"] for worker, slot in workers.items()}
    rates = throughput.update(generated, time.monotonic())
    for worker, slot in workers.items():
        rate = rates[worker]
        slot["tokens_per_s"] = None if rate is None else round(rate, 1)
    return {**shown, "leaving": fleet.leaving}
