"""The cells of the chaos matrix: each combines a fault of a worker with the phase (queued, prefill,
first token ...) that a request is in when the fault strikes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from tokenizers import Tokenizer

from support.models import tokenizer as tokenizers
from support.models.scripted import FaultAction, ModelFault, ScriptedReply

METAL_HANG = (
    "[METAL] Command buffer execution failed: "
    "Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang)."
)
SHAPES = "[broadcast_shapes] Shapes (1,32,64) and (1,33,64) cannot be broadcast."
STEP_S = 0.02

Moment = int | Literal["prefill"]


@dataclass(frozen=True)
class InjectedFault:
    """A fault that ends a worker or its batch. ``kind`` is the fault's kind in the record of the
    worker's death; empty if the worker survives. The scripted model performs ``action``; without
    one, the test injects the fault from outside while the model waits. A ``slow`` fault is noticed
    only when a time limit of the reaper, the workers' supervisor, has run out."""

    name: str
    kind: str = ""
    action: FaultAction | None = None
    message: str = ""
    slow: bool = False

    def faults(self, at: Moment, name: str, *, held: bool) -> list[ModelFault]:
        """Returns the faults to build the scripted model with; ``held`` makes the model first wait
        for the test, in a wait called ``name``."""
        wait = ModelFault(at, "wait", name, times=1)
        own = [ModelFault(at, self.action, self.message, times=1)] if self.action else []
        return [wait, *own] if held or not self.action else own


INJECTED_FAULTS = [
    InjectedFault("sigkill", "killed", "kill"),
    InjectedFault("sigsegv", "crashed", "segfault"),
    InjectedFault("sigabrt", "aborted", "abort"),
    InjectedFault("sigstop", "silent", "sigstop", slow=True),
    InjectedFault("worker fault", "metal_hang", "raise", METAL_HANG),
    InjectedFault("batch fault", "", "raise", SHAPES),
    InjectedFault("wedge", "wedged", "spin_gil_released", slow=True),
    InjectedFault("handover", "left"),
    InjectedFault("recycle"),
]


@cache
def _vocabulary() -> Tokenizer:
    return tokenizers.train("tools")


def _token_at(reply: str, fragment: str) -> int:
    """Returns the index, within the reply's tokens, of the second token of ``fragment``."""
    begin = reply.index(fragment)
    offsets = _vocabulary().encode(reply).offsets
    inside = [n for n, (start, _) in enumerate(offsets) if start >= begin]
    return inside[1]


@dataclass(frozen=True)
class RequestPhase:
    """A phase of a request in which a fault strikes. ``at`` finds the moment within the model's
    ``reply``; ``says`` is the text that the client gets (None: the whole reply)."""

    name: str
    reply: str
    at: Callable[[str], Moment]
    body: dict[str, Any] = field(default_factory=dict)
    says: str | None = None

    def moment(self) -> Moment:
        return self.at(self.reply)


STORY = "Once upon a time there was a mayfly, and it lived for a day by the river."
BUTTERFLY = "Look, a butterfly: \U0001f98b! It is gone."
STOPPED = "The first half. THE END OF IT ALL is not to be seen."
CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
)
RECORD = '{"name":"item 7","size":10.5}'
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "number"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "record", "schema": SCHEMA}}

PHASES = [
    RequestPhase("queued", STORY, lambda reply: 3),
    RequestPhase("prefill", STORY, lambda reply: "prefill"),
    RequestPhase("first token", STORY, lambda reply: 0),
    RequestPhase("text", STORY, lambda reply: _token_at(reply, "mayfly")),
    RequestPhase("emoji", BUTTERFLY, lambda reply: _token_at(reply, "\U0001f98b")),
    RequestPhase(
        "stop string",
        STOPPED,
        lambda reply: _token_at(reply, "THE END"),
        {"stop": ["THE END OF IT ALL"]},
        "The first half. ",
    ),
    RequestPhase("tool call", CALL, lambda reply: _token_at(reply, "Paris"), {"tools": [TOOL]}, ""),
    RequestPhase(
        "grammar", RECORD, lambda reply: _token_at(reply, "item"), {"response_format": FORMAT}
    ),
    RequestPhase("last token", STORY, lambda reply: len(_vocabulary().encode(reply).ids)),
]
QUEUED = PHASES[0]
FILLER = ScriptedReply("[filler]", "and so on " * 500)


@dataclass(frozen=True)
class MatrixCase:
    injected: InjectedFault
    phase: RequestPhase

    @property
    def name(self) -> str:
        return f"{self.injected.name}, {self.phase.name}"

    @property
    def wait(self) -> str:
        """The name of the wait in which the scripted model waits for the test."""
        return self.name.replace(" ", "-").replace(",", "")

    @property
    def held(self) -> bool:
        """True if the scripted model waits for the test before the fault, because the test injects
        the fault from outside or first has to put another request into the queue."""
        return self.injected.action is None or self.phase is QUEUED

    @property
    def trigger(self) -> str:
        return f"[{self.name}]"

    @property
    def blocker(self) -> str:
        """Prompt of the request that runs while the queued request waits."""
        return f"[before {self.name}]"

    def replies(self) -> list[ScriptedReply]:
        faults = self.injected.faults(self.phase.moment(), self.wait, held=self.held)
        if self.phase is QUEUED:
            return [
                ScriptedReply(self.trigger, self.phase.reply),
                ScriptedReply(self.blocker, STORY, faults),
            ]
        return [ScriptedReply(self.trigger, self.phase.reply, faults)]


MATRIX = [MatrixCase(fault, phase) for fault in INJECTED_FAULTS for phase in PHASES]
ROW_AND_COLUMN = [
    cell for cell in MATRIX if cell.injected.name == "sigkill" or cell.phase.name == "text"
]
"""The cells with SIGKILL in every phase, and those with every fault in the phase "text"."""
