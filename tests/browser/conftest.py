"""A real browser, a check of every page that it opens, and a clock of a node's rosters."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import zmq
from playwright.sync_api import Browser, Page, expect, sync_playwright

from mayfly_protocol.codec import rosters
from mayfly_protocol.roster import ROSTER_TOPIC, Roster
from mayfly_reaper.paths import runtime_of
from support.server import wait_for

FLAGS = (
    "--no-sandbox",  # tests may run as root
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-background-networking",
)
PATIENCE_MS = 20_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, which Playwright drives as well as its own."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium here (on Debian: apt-get install chromium)")
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        yield browser
        browser.close()


@dataclass
class WatchedPage:
    """A page, its console messages and its requests. ``complaints`` include error statuses that a
    test provokes; :meth:`unclean` leaves those out."""

    page: Page
    origin: str
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def unclean(self) -> list[str]:
        """Returns requests that left the origin, and complaints other than of an answer's
        status."""
        strangers = [
            url for url in self.requests if not url.startswith((f"{self.origin}/", "about:"))
        ]
        return strangers + [each for each in self.complaints if "responded with" not in each]


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., WatchedPage]]:
    """Opens a server's page in a browser profile of its own, and checks at the end that it logged
    no error and sent no request to another origin."""
    visited: list[WatchedPage] = []

    def go(
        origin: str, *, width: int = 1280, height: int = 680, scheme: str = "light"
    ) -> WatchedPage:
        size = {"width": width, "height": height}
        context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
        context.set_default_timeout(PATIENCE_MS)
        watched = WatchedPage(context.new_page(), origin)
        page = watched.page
        page.on("console", lambda said: watched.complaints.append(f"{said.type}: {said.text}"))
        page.on("pageerror", lambda error: watched.complaints.append(str(error)))
        page.on("request", lambda request: watched.requests.append(request.url))
        visited.append(watched)
        page.goto(f"{origin}/")
        return watched

    yield go
    for watched in visited:
        watched.page.context.close()
        assert watched.unclean() == []


class RosterClock:
    """Subscribes to a node's rosters, as front ends do, and records when each event was first in
    one."""

    def __init__(self, state_dir: Path) -> None:
        self._address = runtime_of(state_dir).roster
        self._stop = threading.Event()
        self._lost: dict[int, float] = {}
        self._ready: dict[int, float] = {}
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> RosterClock:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(5)

    def lost_at(self, incarnation: int) -> float:
        """Returns when a worker's loss was first published; waits, as the page may have it
        earlier."""
        return wait_for(lambda: self._lost.get(incarnation), "a loss in the roster")

    def ready_at(self, incarnation: int) -> float:
        return wait_for(lambda: self._ready.get(incarnation), "a ready worker in the roster")

    def _listen(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.SUBSCRIBE, ROSTER_TOPIC)
        socket.connect(self._address)
        while not self._stop.is_set():
            if socket.poll(100):
                self._hear(rosters.decode(socket.recv_multipart()[-1]), time.monotonic())
        context.destroy(linger=0)

    def _hear(self, roster: Roster, now: float) -> None:
        for loss in roster.losses:
            self._lost.setdefault(loss.incarnation, now)
        for view in roster.slots:
            if view.state == "ready":
                self._ready.setdefault(view.incarnation, now)
