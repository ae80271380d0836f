"""A front end's list of nodes from its configuration file, and changes of that file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mayfly_protocol.transport.addresses import AddressError
from mayfly_protocol.transport.keys import make_pair
from mayfly_server.dispatch.connector import Connector
from mayfly_server.dispatch.fleet import Fleet
from mayfly_server.dispatch.node_list import NodeList, nodes_in
from mayfly_server.metrics import Metrics
from mayfly_server.settings import FrontSettings
from support.doubles.fake_node import WORDS, FakeNode, answer_words
from support.relay_requests import ask, content
from support.running_front import RunningFront
from support.server import free_ports


def named(*nodes: str) -> str:
    return f"port = 9000\nnodes = {list(nodes)!r}\n"


def test_only_what_names_nodes_is_followed() -> None:
    assert nodes_in(named("a", "b")) == ["a", "b"]
    for content_ in ("", "nodes = []", "nodes = 'a'", "nodes = [1]", "nodes = [", "port = 9000"):
        with pytest.raises(AddressError):
            nodes_in(content_)


def test_a_change_is_followed_once(tmp_path: Path) -> None:
    file = tmp_path / "mayfly.toml"
    file.write_text(named("a"))
    followed: list[list[str]] = []
    nodes = NodeList(file, lambda wanted: followed.append(list(wanted)))
    nodes.reload_if_changed()
    assert followed == [], "what it began with is known"
    file.write_text(named("a", "b"))
    nodes.reload_if_changed()
    nodes.reload_if_changed()
    assert followed == [["a", "b"]]


@pytest.mark.parametrize("content", ["nodes = [", "nodes = []", ""])
def test_a_broken_file_changes_nothing_and_says_so(tmp_path: Path, content: str) -> None:
    file = tmp_path / "mayfly.toml"
    file.write_text(named("a"))
    nodes = NodeList(file, lambda wanted: pytest.fail("it was followed"))
    file.write_text(content)
    with capture_logs() as logs:
        nodes.reload_if_changed()
        nodes.reload_if_changed()
    [entry] = logs
    assert entry["event"] == "node list not reloaded, the previous nodes stay in use"
    file.unlink()
    nodes.reload_if_changed()


@pytest.fixture
def nodes() -> Iterator[tuple[FakeNode, FakeNode]]:
    first, second = free_ports(4), free_ports(4)
    with FakeNode(port=first, name="first") as one, FakeNode(port=second, name="second") as two:
        yield one, two


def test_nodes_come_and_go_while_a_front_end_serves(
    nodes: tuple[FakeNode, FakeNode], tmp_path: Path
) -> None:
    first, second = nodes
    make_pair(tmp_path)
    file = tmp_path / "mayfly.toml"
    file.write_text(named(first.control))
    old, new = first.worker(answer_words()), second.worker(answer_words())
    with RunningFront(first.control, state_dir=tmp_path, nodes_file=file) as front:
        assert content(ask(front)) == "".join(WORDS)
        file.write_text(named(first.control, second.control))
        front.wait_workers(2)
        file.write_text(named(second.control))
        front.wait(lambda: front.front.fleet.ready_workers() == 1)
        assert [roster.node for roster, _ in front.front.fleet.nodes()] == ["second"]
        for number in range(4):
            assert content(ask(front, f"conversation {number}")) == "".join(WORDS)
        assert (len(old.submits), len(new.submits)) == (1, 4)


async def test_an_address_that_cannot_be_dialled_changes_nothing(
    nodes: tuple[FakeNode, FakeNode],
) -> None:
    fleet = Fleet(FrontSettings(nodes=("tcp://127.0.0.1:1",)), Metrics(), Connector())
    fleet.start()
    try:
        for wrong in ("tcp://no-key.example:7700", nodes[0].control, "nonsense"):
            with pytest.raises(AddressError):  # the second has a key, and this front end has none
                fleet.use_nodes(["tcp://127.0.0.1:2", wrong])
            assert list(fleet._nodes) == ["tcp://127.0.0.1:1"]
        fleet.use_nodes(["tcp://127.0.0.1:2"])
        assert list(fleet._nodes) == ["tcp://127.0.0.1:2"]
    finally:
        await fleet.close()
