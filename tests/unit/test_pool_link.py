"""A link's own state and load. Its messages are tested with the relay."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
from structlog.testing import capture_logs

from mayfly_protocol.requests import Generation, Sampling, TextPrompt
from mayfly_protocol.roster import SlotView
from mayfly_protocol.serving import Submit
from mayfly_server.dispatch.link import Context, Link, State
from mayfly_server.dispatch.mailbox import Mailbox
from mayfly_server.dispatch.rosters import Slot


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)


def opened(context: Context, folder: Path) -> Link:
    view = SlotView("smol-0", "smol", "ready", 1, endpoint=f"ipc://{folder}/w1.ipc")
    link = Link(
        context,
        Slot("ipc://node", "mac-1", "e", view, 0.0, silent=False),
        connect=lambda socket: socket.connect(view.endpoint),
        pong_wait_s=5.0,
        on_change=lambda: None,
        on_message=lambda: None,
        on_late_message=lambda: None,
    )
    link.state = State.OPEN
    return link


async def level_of_the_loss(link: Link) -> str:
    with capture_logs() as logs:
        link.lose("disconnected")
    [entry] = logs
    assert entry["event"] == "worker lost: its requests continue on other workers"
    return str(entry["log_level"])


async def test_a_lost_worker_is_news(context: Context, tmp_path: Path) -> None:
    assert await level_of_the_loss(opened(context, tmp_path)) == "info"


async def test_one_that_was_told_to_leave_is_none(context: Context, tmp_path: Path) -> None:
    link = opened(context, tmp_path)
    for state in ("draining", "gone"):
        view = replace(link.slot.view, state=state)
        link.update_slot(replace(link.slot, view=view))
    assert await level_of_the_loss(link) == "debug"


async def test_a_worker_with_something_to_do_that_does_not_move_is_stalled(
    context: Context, tmp_path: Path
) -> None:
    link = opened(context, tmp_path)
    start = link.progressed_at

    def told(after_s: float, progress: int, running: int) -> bool:
        view = replace(link.slot.view, progress=progress, running=running)
        link.update_slot(replace(link.slot, view=view, heard_at=start + after_s))
        return link.stalled

    assert not told(100.0, 0, 0), "it has nothing to do"
    assert not told(101.0, 0, 1)
    assert not told(102.0, 1, 1)
    assert not told(103.9, 1, 1)
    assert told(104.1, 1, 1)
    assert not told(104.2, 2, 1)
    assert told(107.0, 2, 1)
    assert not told(107.1, 2, 0)
    link.close("the end")


async def test_a_worker_that_reports_nothing_has_what_it_was_given(
    context: Context, tmp_path: Path
) -> None:
    """Rosters go on to come, and say of one that has stopped what it said last."""
    link = opened(context, tmp_path)
    for number in range(3):
        generation = Generation("smol", TextPrompt("hi"), Sampling(seed=0))
        link.submit(Submit(f"r{number}", 1, generation), Mailbox())
    assert link.load == 3
    assert not link.stalled
    link.update_slot(replace(link.slot, heard_at=asyncio.get_running_loop().time() + 10))
    assert link.load == 3
    assert link.stalled
    link.cancel("r0", 1)
    assert link.load == 2
    link.close("the end")
