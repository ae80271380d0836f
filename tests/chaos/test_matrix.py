"""Whatever becomes of a worker, whatever its request was doing: the answer is the undisturbed one,
token for token."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from chaos_cells import CELLS, CROSS, FILLER, QUEUED, STEP_S, Blow, Cell
from mayfly_protocol.roster import ROSTER_INTERVAL_S, Recycle
from mayfly_server.cli.control import tell
from mayfly_server.pool.link import REPORT_LAG_S
from server_harness import Server, serving, wait_for

CALM = {
    "retry_s": 0.1,
    "retry_max_s": 0.5,
    "spacing_s": 0.1,
    "steady_s": 0.0,
    "trial_losses": 1000,
    "batch_faults": 1000,
    "drain_s": 0.3,
    "stacks_s": 0.3,
    "terminate_s": 0.3,
}
IMPATIENT = CALM | {"decode_s": 2.0, "prefill_s": 2.0, "first_factor": 1.5, "silent_s": 2.5}


@dataclass
class Answer:
    """What a client got. Ids of tool calls differ from request to request, and are kept apart."""

    rid: str = ""
    tokens: list[bytes] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    calls: list[list[str]] = field(default_factory=list)
    call_ids: list[str] = field(default_factory=list)
    finish: str | None = None
    usage: tuple[int, int, int] | None = None
    """Without what came from a cache, which is another worker's."""

    def take(self, chunk: Any) -> None:
        assert self.rid in ("", chunk.id)
        self.rid = chunk.id
        if (usage := chunk.usage) is not None:
            thoughts = usage.completion_tokens_details.reasoning_tokens
            self.usage = (usage.prompt_tokens, usage.completion_tokens, thoughts)
        for choice in chunk.choices:
            assert self.finish is None, "nothing comes after the end"
            self.finish = choice.finish_reason
            self.text += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                if call.id:
                    self.call_ids.append(call.id)
                    self.calls.append([call.function.name, ""])
                self.calls[call.index][1] += call.function.arguments or ""
            for token in choice.logprobs.content if choice.logprobs else []:
                self.tokens.append(bytes(token.bytes))
                self.logprobs.append(token.logprob)

    def said(self) -> tuple[Any, ...]:
        return self.tokens, self.text, self.calls, self.finish, self.usage


class Asking(threading.Thread):
    """A client that reads its stream to the end. ``began`` when its request was accepted."""

    def __init__(self, server: Server, text: str, **body: Any) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._body = {
            "messages": [{"role": "user", "content": text}],
            "stream_options": {"include_usage": True},
            "prompt_cache_key": "together",
            "logprobs": True,
            "seed": 7,
        } | body
        self.answer = Answer()
        self.began = threading.Event()
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        create = self._server.client.chat.completions.create
        try:
            stream = create(model=self._server.model, stream=True, **self._body)
            self.began.set()
            for chunk in stream:
                self.answer.take(chunk)
        except Exception as error:
            self._error = error
            self.began.set()

    def result(self) -> Answer:
        self.join(60)
        assert not self.is_alive(), "the stream has no end"
        if self._error is not None:
            raise self._error
        return self.answer


def build(scripted_model: Callable[..., Path], blows: Callable[[Blow], bool]) -> Path:
    plays = [play for cell in CELLS if blows(cell.blow) for play in cell.plays()]
    return scripted_model([FILLER, *plays], step_s=STEP_S)


@pytest.fixture(scope="module")
def calm(
    scripted_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    model = build(scripted_model, lambda blow: not blow.slow)
    options = ("--trust-remote-code", "--workers", "3")
    with serving(model, tmp_path_factory.mktemp("calm"), *options, budgets=CALM) as server:
        yield server


@pytest.fixture(scope="module")
def impatient(
    scripted_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    model = build(scripted_model, lambda blow: blow.slow)
    options = ("--trust-remote-code", "--workers", "3")
    folder = tmp_path_factory.mktemp("impatient")
    with serving(model, folder, *options, budgets=IMPATIENT) as server:
        yield server


def continued(server: Server) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(CONTINUATIONS))


CONTINUATIONS = "mayfly_continuations_total{"


def somewhere_to_go(server: Server) -> bool:
    """Whether there is a worker to lose and one to go on with."""
    return sum(slot["state"] == "ready" for slot in server.slots()) >= 2


def busy(server: Server) -> dict[str, Any]:
    """The slot of the only worker that has something to do, once its node says so."""

    def found() -> list[dict[str, Any]]:
        return [slot for slot in server.slots() if slot["running"]]

    [slot] = wait_for(found, "a busy worker")
    return slot


@contextlib.contextmanager
def occupied(server: Server) -> Iterator[None]:
    """Something runs elsewhere meanwhile: a worker that has its share of few requests would get no
    second one."""
    chat = server.client.chat.completions
    messages: Any = [{"role": "user", "content": FILLER.trigger}]
    with chat.create(
        model=server.model,
        messages=messages,
        stream=True,
        extra_body={"prompt_cache_key": "together"},
    ) as stream:
        next(iter(stream))
        # Until rosters count what runs, the front end counts it too.
        time.sleep(REPORT_LAG_S + ROSTER_INTERVAL_S)
        yield


def strike(server: Server, cell: Cell, slot: dict[str, Any]) -> None:
    """While the model waits: from outside, or by letting it go on to what it has to meet."""
    match cell.blow.name:
        case "handover":
            os.kill(slot["pid"], signal.SIGTERM)
        case "recycle":
            assert tell(server.state_dir, Recycle(slot["slot"])).ok
        case _:
            (server.folder / f"{cell.wait}.go").touch()


def when_it_waits(server: Server, cell: Cell) -> dict[str, Any]:
    """The slot of the worker whose model waits for a word."""
    wait_for((server.folder / f"{cell.wait}.waits").exists, "the moment")
    return busy(server)


def in_mid_air(server: Server, cell: Cell) -> tuple[Answer, Answer]:
    """What a request got that was struck, and what the one got that was running then."""
    if cell.phase is not QUEUED:
        asking = Asking(server, cell.trigger, **cell.phase.body)
        if cell.held:
            strike(server, cell, when_it_waits(server, cell))
        return asking.result(), asking.result()
    blocker = Asking(server, cell.blocker)
    slot = when_it_waits(server, cell)
    with occupied(server):
        asking = Asking(server, cell.trigger, **cell.phase.body)
        assert asking.began.wait(30)

    def queue() -> int:
        return sum(each["waiting"] for each in server.slots() if each["slot"] == slot["slot"])

    wait_for(queue, "a queue")
    strike(server, cell, slot)
    return asking.result(), blocker.result()


def autopsy_of(server: Server, rid: str) -> dict[str, Any]:
    """Of the worker in whose last forward pass a request was."""

    def found() -> dict[str, Any] | None:
        crumbs = ((a, a["breadcrumb"]) for a in server.autopsies())
        return next((a for a, crumb in crumbs if crumb and rid in crumb["requests"]), None)

    return wait_for(found, f"an autopsy that knows {rid}")


def play(server: Server, cell: Cell) -> None:
    wait_for(lambda: somewhere_to_go(server), "two workers")
    before = continued(server)
    struck, running = in_mid_air(server, cell)
    moved = continued(server) - before

    undisturbed = Asking(server, cell.trigger, **cell.phase.body).result()
    assert struck.said() == undisturbed.said()
    assert struck.logprobs == pytest.approx(undisturbed.logprobs, abs=1e-4)
    assert len(set(struck.call_ids)) == len(struck.calls)
    assert struck.text == (cell.phase.reply if cell.phase.says is None else cell.phase.says)
    if cell.phase is QUEUED:
        assert running.said() == Asking(server, cell.blocker).result().said()

    # It landed where it was meant to.
    assert moved == (2 if cell.phase is QUEUED else 1)
    if cell.blow.kind not in ("", "left"):
        autopsy = autopsy_of(server, running.rid)
        assert autopsy["kind"] == cell.blow.kind
        crumb = autopsy["breadcrumb"]
        assert crumb["phase"] == ("prefill" if cell.phase.name == "prefill" else "decode")
        assert (struck.rid in crumb["requests"]) == (cell.phase is not QUEUED)
        assert bool(autopsy["suspects"] or autopsy["marked"]) == (cell.blow.kind != "killed")


def id_of(cell: Cell) -> str:
    return cell.name


@pytest.mark.parametrize("cell", [c for c in CROSS if not c.blow.slow], ids=id_of)
def test_every_blow_and_every_phase(calm: Server, cell: Cell) -> None:
    play(calm, cell)


@pytest.mark.parametrize("cell", [c for c in CROSS if c.blow.slow], ids=id_of)
def test_every_slow_blow(impatient: Server, cell: Cell) -> None:
    play(impatient, cell)


@pytest.mark.long
@pytest.mark.parametrize(
    "cell", [c for c in CELLS if not c.blow.slow and c not in CROSS], ids=id_of
)
def test_every_blow_in_every_phase(calm: Server, cell: Cell) -> None:
    play(calm, cell)


@pytest.mark.long
@pytest.mark.parametrize("cell", [c for c in CELLS if c.blow.slow and c not in CROSS], ids=id_of)
def test_every_slow_blow_in_every_phase(impatient: Server, cell: Cell) -> None:
    play(impatient, cell)


def test_the_cells_cover_everything() -> None:
    assert len(CELLS) == 81
    assert len(CROSS) == 17
    assert {cell.blow.name for cell in CROSS} == {cell.blow.name for cell in CELLS}
    assert {cell.phase.name for cell in CROSS} == {cell.phase.name for cell in CELLS}
    assert len({play.trigger for cell in CELLS for play in cell.plays()}) == 90
    assert all(replace(cell) == cell for cell in CELLS)
