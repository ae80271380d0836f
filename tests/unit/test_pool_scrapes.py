"""Waiting for the pages of nodes."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from mayfly_server.dispatch import fleet
from mayfly_server.dispatch.fleet import PendingScrapes
from mayfly_server.metrics import Metrics


async def test_any_page_of_a_node_will_do_for_all_who_wait() -> None:
    waiting = PendingScrapes(Metrics())
    asking = [asyncio.create_task(waiting.pages(asked)) for asked in (["a", "b"], ["a"])]
    await asyncio.sleep(0)
    waiting.received("a", "of a")
    waiting.received("b", "of b")
    assert await asyncio.gather(*asking) == [[b"of a", b"of b"], [b"of a"]]


@pytest.mark.parametrize("gives_up", [True, False])
async def test_nothing_is_kept_for_who_waits_no_more(
    gives_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it that it gave up, or that the time was over: a node may be silent for days."""
    monkeypatch.setattr(fleet, "SCRAPE_WAIT_S", 30.0 if gives_up else 0.01)
    loop, made = asyncio.get_running_loop(), weakref.WeakSet[Any]()
    create = loop.create_future

    def remembered() -> asyncio.Future[Any]:
        future = create()
        made.add(future)
        return future

    metrics = Metrics()
    waiting = PendingScrapes(metrics)
    monkeypatch.setattr(loop, "create_future", remembered)
    asking = asyncio.create_task(waiting.pages(["a", "a", "b"]))
    await asyncio.sleep(0)
    assert len(made) >= 3
    monkeypatch.undo()
    waiting.received("b", "of b")
    if gives_up:
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()
    else:
        assert await asking == [b"of b"]
    del asking
    gc.collect()
    assert not made
    waiting.received("a", "too late")
