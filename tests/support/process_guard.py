"""A pytest plugin: a unit test that starts a Python process fails unless the test has the mark
``process``. `make test-fast` leaves out marked tests, so the plugin keeps it fast."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

UNIT = Path(__file__).parents[1] / "unit"

_started: list[str] = []
"""The commands of all Python processes that this process has started."""
_starters: set[tuple[str, str]] = set()
"""Fixtures that have started a Python process, as pairs: node id prefix of the tests that see the
fixture, and its name. A test that uses the fixture later starts no process itself, but would start
one if it ran alone."""


def _note(event: str, details: tuple[Any, ...]) -> None:
    if event in ("os.fork", "os.forkpty"):
        _started.append(event)
    elif event == "subprocess.Popen" and sys.executable in str(details[:2]):
        _started.append(str(details[1]))


sys.addaudithook(_note)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
    before = len(_started)
    try:
        return (yield)
    finally:
        if len(_started) > before:
            _starters.add((fixturedef.baseid, fixturedef.argname))


@pytest.fixture(autouse=True)
def no_unmarked_process(request: pytest.FixtureRequest) -> Iterator[None]:
    before = len(_started)
    yield
    marked = request.node.get_closest_marker("process") is not None
    if not marked and request.path.is_relative_to(UNIT):
        complaint = "a unit test that starts a Python process needs the mark `process`"
        assert _started[before:] == [], complaint
        used = [
            name
            for place, name in _starters
            if name in request.fixturenames and request.node.nodeid.startswith(place)
        ]
        assert used == [], complaint
