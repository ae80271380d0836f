"""A front end with one fake worker, which the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.doubles.fake_node import FakeNode
from support.front_client import Client
from support.running_front import RunningFront


@pytest.fixture(scope="module")
def node() -> Iterator[FakeNode]:
    with FakeNode() as node:
        node.worker()
        yield node


@pytest.fixture(scope="module")
def front(node: FakeNode) -> Iterator[RunningFront]:
    with RunningFront(node.control) as front:
        yield front


@pytest.fixture
def client(front: RunningFront, node: FakeNode) -> Client:
    return Client(front.client, node.workers[0])
