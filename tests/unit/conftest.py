"""A front end with one fake worker, which the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from support.doubles.fake_node import FakeNode

if TYPE_CHECKING:  # a front end takes a second to import, which many tests here need not wait
    from support.front_client import Client
    from support.running_front import RunningFront


@pytest.fixture(scope="module")
def node() -> Iterator[FakeNode]:
    with FakeNode() as node:
        node.worker()
        yield node


@pytest.fixture(scope="module")
def front(node: FakeNode) -> Iterator[RunningFront]:
    from support.running_front import RunningFront

    with RunningFront(node.control) as front:
        yield front


@pytest.fixture
def client(front: RunningFront, node: FakeNode) -> Client:
    from support.front_client import Client

    return Client(front.client, node.workers[0])
