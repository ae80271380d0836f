"""Nodes behind links that stall, break and heal: real sockets, TCP and CURVE, and a proxy between
them. Fake workers answer on the other side."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from mayfly_protocol.transport.addresses import is_ip_address
from mayfly_protocol.transport.keys import make_pair, new_pair
from mayfly_server.dispatch import node_link
from mayfly_server.dispatch.connector import preferred_address, resolve_host
from support.doubles.fake_node import (
    WORDS,
    AnswerScript,
    FakeNode,
    ScriptStep,
    answer_then,
    answer_words,
    finish,
    step,
)
from support.relay_requests import ask, content, pieces, stream
from support.running_front import RunningFront
from support.server import free_ports
from support.tcp_nodes import OTHER_HOST, TcpProxy

SILENCE_S = 2.5
PONG_S = 2.5


@dataclass
class ProxiedNode:
    """A node that is reached through two proxies, for what its reaper says and for its workers."""

    node: FakeNode
    reaper: TcpProxy
    workers: TcpProxy

    @property
    def address(self) -> str:
        return self.node.address(OTHER_HOST)


@pytest.fixture
def far() -> Iterator[ProxiedNode]:
    port = free_ports(8)
    with (
        FakeNode(port=port, name="far") as node,
        TcpProxy(port, port + 1) as reaper,
        TcpProxy(*range(port + 2, port + 8)) as workers,
    ):
        yield ProxiedNode(node, reaper, workers)


@pytest.fixture
def near() -> Iterator[FakeNode]:
    with FakeNode(port=free_ports(8), name="near") as node:
        yield node


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def fronted(folder: Path, *nodes: str, pong_wait_s: float = 10.0) -> RunningFront:
    make_pair(folder)
    return RunningFront(
        *nodes,
        state_dir=folder,
        roster_silence_s=SILENCE_S,
        pong_wait_s=pong_wait_s,
        keep_alive_s=0.2,
        ready=False,
    )


def streaming(
    pool: ThreadPoolExecutor, front: RunningFront, far: ProxiedNode, gate: threading.Event
) -> Future[httpx.Response]:
    """A stream whose first two tokens have come, and that goes on once the gate is open."""
    far.node.worker(gated(2, gate))
    front.wait_workers(1)
    running = pool.submit(stream, front)
    front.wait(lambda: front.metric("mayfly_generation_tokens_total") == 2)
    return running


def gated(count: int, gate: threading.Event) -> AnswerScript:
    def after(submit: object) -> Iterator[ScriptStep]:
        yield gate
        for position in range(count, len(WORDS)):
            last = "stop" if position == len(WORDS) - 1 else None
            yield step(submit, position, WORDS[position], finish=last)  # type: ignore[arg-type]
        yield finish(submit, len(WORDS))  # type: ignore[arg-type]

    return answer_then(count, after)


def test_a_cut_link_moves_the_stream_and_what_comes_late_is_dropped(
    far: ProxiedNode, near: FakeNode, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    gate = threading.Event()
    with fronted(tmp_path, far.address, near.control) as front:
        running = streaming(pool, front, far, gate)
        heir = near.worker(answer_words())
        front.wait_workers(2)
        far.workers.cut()
        front.wait(lambda: bool(heir.submits))
        far.workers.heal()
        gate.set()  # the far worker goes on as if nothing had been
        assert pieces(running.result(20)) == list(WORDS), "each word once, in order"
        assert heir.submits[0].attempt == 2
        assert len(heir.submits[0].resume[0]) == 2


def test_a_stalled_link_moves_the_stream_when_its_pong_is_late(
    far: ProxiedNode, near: FakeNode, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """No connection ends here: the other side is just not heard."""
    gate = threading.Event()
    with fronted(tmp_path, far.address, near.control, pong_wait_s=PONG_S) as front:
        running = streaming(pool, front, far, gate)
        heir = near.worker(answer_words())
        front.wait_workers(2)
        far.workers.stalled = True
        gate.set()
        front.wait(lambda: bool(heir.submits), patience_s=20)
        far.workers.heal()
        assert pieces(running.result(20)) == list(WORDS)


def test_the_only_node_goes_on_when_its_link_is_back(
    far: ProxiedNode, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """The node's worker kept running, and is asked again as there is no other."""
    gate = threading.Event()
    with fronted(tmp_path, far.address) as front:
        running = streaming(pool, front, far, gate)
        far.node.workers[0].script = answer_words()
        far.workers.cut()
        front.wait(lambda: front.front.fleet.ready_workers() == 0)
        gate.set()
        far.workers.heal()
        assert pieces(running.result(20)) == list(WORDS)
        first, second = far.node.workers[0].submits
        assert (first.attempt, second.attempt) == (1, 2)
        assert len(second.resume[0]) == 2


def test_a_silent_reaper_moves_nothing_and_gets_nothing_new(
    far: ProxiedNode, near: FakeNode, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """The reaper's worker still answers, so that its requests go on there."""
    gate = threading.Event()
    with fronted(tmp_path, far.address, near.control) as front:
        running = streaming(pool, front, far, gate)
        far.reaper.stalled = True
        front.wait(lambda: front.front.fleet.ready_workers() == 0)
        other = near.worker(answer_words())
        front.wait_workers(1)
        for number in range(6):
            assert content(ask(front, f"conversation {number}")) == "".join(WORDS)
        assert len(other.submits) == 6
        gate.set()
        assert pieces(running.result(20)) == list(WORDS)
        assert len(other.submits) == 6, "and the stream was never moved"
        far.reaper.heal()
        front.wait_workers(2)


def test_all_nodes_silent_is_said_and_passes(far: ProxiedNode, tmp_path: Path) -> None:
    far.node.worker()
    with fronted(tmp_path, far.address) as front:
        front.wait_workers(1)
        far.reaper.cut()
        far.workers.cut()
        front.wait(lambda: front.client.get("/readyz").status_code == 503)
        refused = ask(front)
        assert refused.status_code == 503
        assert "does not answer" in refused.json()["error"]["message"]
        far.reaper.heal()
        far.workers.heal()
        front.wait_workers(1)
        assert content(ask(front)) == "".join(WORDS)


def test_a_successor_at_the_same_address_has_to_have_the_key(tmp_path: Path) -> None:
    """And when it has, none of its predecessor's workers counts any more."""
    port = free_ports(8)
    first = FakeNode(port=port, name="mac")
    with fronted(tmp_path, first.address("127.0.0.1")) as front:
        with first:
            first.worker()
            front.wait_workers(1)
        front.wait(lambda: front.front.fleet.ready_workers() == 0)
        with FakeNode(port=port, name="impostor") as impostor:
            impostor.worker()
            front.wait(
                lambda: (
                    front.metric('mayfly_wire_refusals_total{by="front end",reason="handshake') > 0
                )
            )
            assert front.front.fleet.ready_workers() == 0
            assert [roster.node for roster, _ in front.front.fleet.nodes()] == ["mac"]
        heir = FakeNode(port=port, name="mac")
        heir.pair = first.pair
        heir.change(epoch="another")
        with heir:
            worker = heir.worker()
            front.wait_workers(1)
            assert content(ask(front)) == "".join(WORDS)
            assert len(worker.submits) == 1


def test_a_worker_with_another_key_than_its_roster_says_is_not_used(
    far: ProxiedNode, tmp_path: Path
) -> None:
    """A stranger at a worker's port cannot pass for the worker."""
    worker = far.node.worker()
    with fronted(tmp_path, far.address) as front:
        front.wait_workers(1)
        view = far.node.view("slot-1")
        far.node.show(replace(view, incarnation=7, public_key=new_pair().public))
        front.wait(lambda: front.front.fleet.ready_workers() == 0)
        far.node.show(replace(view, incarnation=8, public_key=""))
        refused = 'mayfly_wire_refusals_total{by="front end",reason="nonsense'
        front.wait(lambda: front.metric(refused) > 0)
        assert front.front.fleet.ready_workers() == 0
        far.node.show(replace(view, incarnation=9))
        front.wait_workers(1)
        assert content(ask(front)) == "".join(WORDS)
        assert len(worker.submits) == 1


def test_a_roster_cannot_send_a_front_end_elsewhere(far: ProxiedNode, tmp_path: Path) -> None:
    """The host of a worker is that of its node, whatever the node says."""
    far.node.worker()
    with fronted(tmp_path, far.address) as front:
        front.wait_workers(1)
        view = far.node.view("slot-1")
        port = view.endpoint.rpartition(":")[2]
        far.node.show(replace(view, incarnation=2, endpoint=f"tcp://192.0.2.1:{port}"))
        front.wait(lambda: usable(front) == [2])
        assert content(ask(front)) == "".join(WORDS)


def usable(front: RunningFront) -> list[int]:
    """Incarnations that can be given a request."""
    return [slot.view.incarnation for slot, _ in front.front.fleet._usable()]


def test_a_node_is_found_by_its_name_and_one_that_is_not_keeps_nobody_waiting(
    near: FakeNode, tmp_path: Path
) -> None:
    nowhere = near.control.replace("127.0.0.1", "nowhere.invalid")
    near.worker()
    with fronted(tmp_path, nowhere, near.address("localhost")) as front:
        front.wait_workers(1)
        assert content(ask(front)) == "".join(WORDS)


def test_a_node_whose_address_changes_is_found_at_the_new_one(
    near: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The front end resolves the node's name again after a while of silence."""
    found = [OTHER_HOST]

    async def known(host: str) -> str:
        assert host == "mac-2.local"
        return found[-1]

    monkeypatch.setattr(node_link, "resolve_host", known)
    monkeypatch.setattr(node_link, "REOPEN_S", 1.5)
    port = near.control.rpartition(":")[2]
    near.worker()
    with TcpProxy(*range(int(port), int(port) + 8)) as moved:
        moved.cut()  # nobody is at the old address any more
        with fronted(tmp_path, near.address("mac-2.local")) as front:
            front.wait(lambda: front.client.get("/readyz").status_code == 503)
            found.append("127.0.0.1")
            front.wait_workers(1)
            assert content(ask(front)) == "".join(WORDS)


def test_names_and_what_is_preferred_of_their_addresses() -> None:
    v4 = (socket.AF_INET, 1, 6, "", ("10.0.0.2", 0))
    v6 = (socket.AF_INET6, 1, 6, "", ("fe80::1", 0, 0, 2))
    assert preferred_address([v6, v4]) == preferred_address([v4]) == "10.0.0.2"
    assert preferred_address([v6]) == "[fe80::1]"
    with pytest.raises(OSError, match="no address"):
        preferred_address([])
    assert all(map(is_ip_address, ("10.0.0.2", "::1", "[::1]")))
    assert not any(map(is_ip_address, ("mac-2.local", "localhost", "")))


@pytest.mark.parametrize("host", ["mac..local", ".local", "m" * 64 + ".local"])
async def test_a_name_that_leads_nowhere_is_an_oserror(host: str) -> None:
    with pytest.raises(OSError, match="not a possible host name"):
        await resolve_host(host)


def test_a_link_that_breaks_again_and_again(
    far: ProxiedNode, near: FakeNode, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """Streams on two nodes, one of which is cut off and comes back all the time."""
    for node in (far.node, near):
        node.worker(answer_words(pause_s=0.15))
    with fronted(tmp_path, far.address, near.control) as front:
        front.wait_workers(2)
        running = [
            pool.submit(stream, front, messages=[{"role": "user", "content": f"hello {number}"}])
            for number in range(12)
        ]
        for _ in range(4):  # as often as a request may outlive a worker
            far.workers.cut()
            time.sleep(0.2)
            far.workers.heal()
            time.sleep(0.2)
        for each in running:
            assert pieces(each.result(30)) == list(WORDS)
