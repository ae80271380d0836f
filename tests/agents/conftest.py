"""Fixtures that the tests of released clients share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support import agents


@pytest.fixture(scope="session")
def modules() -> Iterator[Path]:
    """The installed releases, with no network but the loopback interface as long as they run."""
    installed = agents.install()
    with agents.loopback_alone():
        yield installed
