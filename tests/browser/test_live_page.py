"""The live page in a real browser, before a real server whose workers are killed.

``MAYFLY_SCREENSHOTS=docs/images`` makes the pictures of the manual on the way.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from browser.conftest import RosterClock, WatchedPage
from mayfly_server.http.api_keys import Key, digest_of
from support.doubles.fake_node import FakeNode, answer_words
from support.models import scripted
from support.models.scripted import ScriptedReply
from support.running_front import RunningFront
from support.server import Server, serving, wait_for

SOON_S = 2.0
"""From what a roster says to what a reader sees."""
STEP_S = 0.04
STORY = " ".join(f"On day {day} the mayfly danced above the water." for day in range(1, 21))
KEYS = (Key("someone", digest_of("key-of-someone")), Key("me", digest_of("key-of-me"), admin=True))
PHONE = {"width": 360, "height": 740}

Visit = Callable[..., WatchedPage]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("page")
    model = scripted.build(folder / "mayfly-tales", [ScriptedReply("story", STORY)], step_s=STEP_S)
    with serving(model, folder, "--trust-remote-code", "--workers", "2") as server:
        wait_for(lambda: [s["state"] for s in server.slots()] == ["ready"] * 2, "both workers")
        yield server


def picture(page: Page, name: str) -> None:
    """Saves a screenshot for the manual, if one was asked for."""
    if folder := os.environ.get("MAYFLY_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def serious(page: Page) -> list[str]:
    """Returns the serious accessibility violations that axe finds on a page."""
    found = Axe().run(page).response["violations"]
    return [
        f"{each['id']}: {node['html']}"
        for each in found
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


def lose_a_worker(server: Server, page: Page) -> float:
    """Kills a worker during an answer, which goes on to its end. Returns the longest time that the
    page took, from the roster on, to show the death, its cause and the successor."""
    expect(page.locator("#connection")).to_have_text("live")
    expect(page.locator(".slot")).to_have_count(2)
    expect(page.locator(".state")).to_have_text(["ready", "ready"])
    with RosterClock(server.state_dir) as clock:
        page.locator("#say").fill("Tell me a story")
        page.keyboard.press("Enter")
        expect(page.locator("#log .model")).to_contain_text("On day 2")
        [victim] = wait_for(lambda: [s for s in server.slots() if s["running"]], "a busy worker")
        expect(page.locator("#total-running")).to_have_text("1")
        picture(page, "page-light")

        os.kill(victim["pid"], signal.SIGKILL)
        which = f"{victim['slot']}, worker {victim['incarnation']}"
        loss = page.locator("#loss-list > li", has_text=which).first
        loss.get_by_text("SIGKILL from outside").wait_for()
        cause_seen = time.monotonic()
        slot = page.locator(".slot", has_text=victim["slot"])
        slot.locator(".lives", has_text=f"#{victim['incarnation']} killed").wait_for()
        death_seen = time.monotonic()
        picture(page, "page-loss")

        slot.locator(".lives", has_text="now").wait_for()
        slot.locator(".state", has_text="ready").wait_for()
        successor_seen = time.monotonic()
        successor = server.slots()[int(victim["slot"].rpartition("-")[2])]
        expect(slot.locator(".facts")).to_contain_text(f"worker {successor['incarnation']}")
        assert successor["incarnation"] > victim["incarnation"]
        lost_at = clock.lost_at(victim["incarnation"])
        ready_at = clock.ready_at(successor["incarnation"])
    expect(page.locator("#news")).to_contain_text(f"worker {successor['incarnation']} is ready")
    expect(page.locator("#log .model")).to_have_text(STORY)
    expect(page.locator("#send")).to_be_enabled()
    return max(cause_seen - lost_at, death_seen - lost_at, successor_seen - ready_at)


def test_a_worker_dies_before_the_readers_eyes(server: Server, visit: Visit) -> None:
    """The page shows everything as soon as it is known; a machine that stands still may delay that
    twice."""
    pages = (visit(server.url).page for _ in range(3))
    page = next((page for page in pages if lose_a_worker(server, page) < SOON_S), None)
    assert page, "shown too late, three times"
    loss = page.locator("#loss-list > li").first
    loss.locator("summary").click()
    expect(loss).to_contain_text("mayfly faults show")
    page.emulate_media(color_scheme="dark")
    picture(page, "page-dark")
    page.set_viewport_size(PHONE)
    picture(page, "page-phone")


def test_a_load_has_a_bar(visit: Visit) -> None:
    with FakeNode() as node:
        node.worker(answer_words("hi"))
        with RunningFront(node.control) as front:
            page = visit(front.url).page
            view = node.view("slot-1")
            expect(page.locator(".state")).to_have_text("ready")
            loading = {"state": "loading", "phase": "loading", "endpoint": "", "incarnation": 9}
            node.show(replace(view, **loading, load_done=250_000_000, load_total=1_000_000_000))
            expect(page.locator(".state")).to_have_text("loading")
            bar = page.get_by_role("progressbar")
            expect(bar).to_have_attribute("value", "250000000")
            expect(bar).to_have_attribute("max", "1000000000")
            expect(page.locator(".meter")).to_contain_text("loading weights · 250 MB of 1.0 GB")
            expect(page.locator(".lives li")).to_have_text(["#1 replaced", "#9 starting"])
            node.lose("slot-1", "wedged")
            expect(page.locator(".state")).to_have_text("waiting")
            expect(page.locator("#loss-list")).to_contain_text("wedged")
            expect(page.locator("#loss-list")).to_contain_text("is being ended")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nobody_is_kept_out(server: Server, visit: Visit, scheme: str) -> None:
    """Axe's rules, contrast among them, on a desk and on a phone, with everything open."""
    page = visit(server.url, scheme=scheme).page
    expect(page.locator(".slot")).to_have_count(2)
    if page.locator("#loss-list summary").count():
        page.locator("#loss-list summary").first.click()
    page.locator("#say").fill("Tell me a story")
    expect(page.locator("#connection")).to_have_text("live")
    assert serious(page) == []
    page.set_viewport_size(PHONE)
    assert serious(page) == []


def test_a_phone_shows_everything_without_scrolling_sideways(server: Server, visit: Visit) -> None:
    page = visit(server.url, **PHONE).page
    expect(page.locator(".slot")).to_have_count(2)
    wide = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    assert wide <= 0
    for part in ("#total-ready", ".slot", "#losses", "#say", "#send"):
        box = page.locator(part).first.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= PHONE["width"]
    assert page.locator("#send").bounding_box()["height"] >= 40  # type: ignore[index]


def test_states_are_told_without_colour(server: Server, visit: Visit) -> None:
    """Each has a word and a sign of its own, here and in the list of a slot's workers."""
    page = visit(server.url).page
    expect(page.locator(".state")).to_have_text(["ready", "ready"])
    for state in page.locator(".state").all():
        assert state.get_attribute("data-sign") == "●"
        content = "getComputedStyle(node, '::before').content"
        assert "●" in state.evaluate(f"node => {content}")
    for life in page.locator(".lives li").all():
        assert life.get_attribute("data-sign") in ("●", "†", "○")
        assert any(word in life.inner_text() for word in ("now", "killed", "replaced"))


def test_the_keyboard_reaches_everything(server: Server, visit: Visit) -> None:
    page = visit(server.url).page
    expect(page.locator("#connection")).to_have_text("live")
    page.keyboard.press("Tab")
    skip = page.locator(":focus")
    expect(skip).to_have_text("Skip to the chat")
    expect(skip).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.locator("#say")).to_be_focused()
    page.keyboard.type("first line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("of a story")
    expect(page.locator("#say")).to_have_value("first line\nof a story")
    page.keyboard.press("Enter")
    expect(page.locator("#log .model")).to_contain_text("On day 1")
    page.keyboard.press("Tab")
    expect(page.locator("#stop")).to_be_focused()
    shown = page.locator(":focus").evaluate("node => getComputedStyle(node).outlineStyle")
    assert shown == "solid"
    page.keyboard.press("Enter")
    expect(page.locator("#send")).to_be_enabled()
    wait_for(lambda: all(not s["running"] for s in server.slots()), "the answer's end")
    assert page.locator("#log .model").inner_text() != STORY
    page.locator("#forget").focus()
    page.keyboard.press("Space")
    expect(page.locator("#log .model")).to_have_count(0)


def test_with_keys_it_asks_for_one(visit: Visit) -> None:
    """The page opens for everybody, and shows what the reader's key may see. The key stays in the
    tab."""
    with FakeNode() as node:
        node.worker(answer_words("I", " am", " here."))
        with RunningFront(node.control, ready=False, keys=KEYS) as front:
            front.wait_workers(1)
            watched = visit(front.url)
            page = watched.page
            expect(page.locator("#key-why")).to_have_text("This server asks for an API key.")
            expect(page.locator("#key-value")).to_be_focused()
            expect(page.locator("body")).not_to_contain_text("slot-1")
            assert serious(page) == []

            give(page, "wrong")
            expect(page.locator("#key-why")).to_have_text("This API key is not known here.")
            give(page, "key-of-someone")
            expect(page.locator("#key-why")).to_contain_text("an admin's key is needed")
            expect(page.locator("body")).not_to_contain_text("slot-1")
            page.locator("#say").fill("Are you there?")
            page.locator("#send").click()
            expect(page.locator("#log .model")).to_have_text("I am here.")
            give(page, "key-of-me")
            expect(page.locator(".slot")).to_contain_text("slot-1")
            expect(page.locator("#key")).to_be_hidden()

            stored = page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]")
            assert stored == [0, 1, ""]
            assert not [url for url in watched.requests if "key-of" in url]
            page.reload()
            expect(page.locator(".slot")).to_contain_text("slot-1")


def give(page: Page, key: str) -> None:
    page.locator("#key-value").fill(key)
    page.keyboard.press("Enter")


def test_a_server_that_comes_back_is_found_again(visit: Visit) -> None:
    with FakeNode() as node:
        node.worker()
        with RunningFront(node.control, roster_silence_s=1.0) as front:
            watched = visit(front.url)
            page = watched.page
            expect(page.locator("#connection")).to_have_text("live")
            node.silent = True
            expect(page.locator(".node > h3")).to_contain_text("has not been heard of lately")
            node.silent = False
            expect(page.locator(".node > h3")).to_contain_text("reaper 1")
            page.route("**/mayfly/events", lambda route: route.abort())
            page.reload()
            expect(page.locator("#connection")).to_have_text("not connected; trying again")
            page.unroute("**/mayfly/events")
            expect(page.locator("#connection")).to_have_text("live")
        expect(page.locator("#connection")).not_to_have_text("live")
        page.goto("about:blank")
        watched.complaints.clear()  # of connections that were refused, as they had to be
