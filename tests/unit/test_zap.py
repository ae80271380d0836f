"""Peers that a guarded socket lets in, with real sockets on the loopback interface."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zmq

from mayfly_protocol.common.throttle import QUIET_S, LogThrottle
from mayfly_protocol.transport.keys import KeyPair, TrustList, new_pair, trusted_file, write_trusted
from mayfly_protocol.transport.sockets import configure, configure_tcp, connect_curve
from mayfly_protocol.transport.zap import (
    Refusals,
    ZapAuthenticator,
    peer_address,
    plain_address,
    user,
)
from support.node import wait_until
from support.tcp_nodes import send_unless_refused


class GuardedEcho:
    """A guarded ROUTER that answers every message with itself. Whoever has not shown a key after
    ``handshake_s`` is cut."""

    def __init__(self, folder: Path, handshake_s: float = 10.0) -> None:
        self.file = trusted_file(folder)
        self.pair = new_pair()
        self.said: list[str] = []
        self.now = 0.0
        self.received: list[bytes] = []
        self.revoked: set[str] = set()
        self._context: zmq.Context[Any] = zmq.Context()
        self.refusals = Refusals(self.said.append, lambda: self.now)
        self.authenticator = ZapAuthenticator(
            self._context, TrustList(self.file), self.refusals, lambda: self.now
        )
        self._router = self._context.socket(zmq.ROUTER)
        configure(self._router)
        configure_tcp(self._router, "127.0.0.1")
        self._router.setsockopt(zmq.HANDSHAKE_IVL, int(handshake_s * 1000))
        self.authenticator.guard(self._router, "house", self.pair)
        self.port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._poller = zmq.Poller()
        for polled in (self._router, *self.authenticator.sockets):
            self._poller.register(polled, zmq.POLLIN)
        self._guests: list[zmq.Socket[Any]] = []

    def live(self, until: Callable[[], bool], what: str) -> None:
        def turn() -> bool:
            self._poller.poll(10)
            self.revoked |= self.authenticator.poll()
            while self._router.poll(0):
                parts = self._router.recv_multipart(copy=False)
                if self.authenticator.admits(parts[-1]):
                    self.received.append(parts[-1].bytes)
                    self.who = (user(parts[-1]), peer_address(parts[-1]))
                    self._router.send_multipart(parts)
            return until()

        wait_until(turn, what)

    def guest(self, own: KeyPair | None, server: str | None = None) -> zmq.Socket[Any]:
        """Somebody who has said hello."""
        guest = self._context.socket(zmq.DEALER)
        configure(guest)
        if own is not None:
            connect_curve(guest, own, server or self.pair.public)
        guest.connect(f"tcp://127.0.0.1:{self.port}")
        send_unless_refused(guest, b"hello")
        self._guests.append(guest)
        return guest

    def close(self) -> None:
        self.authenticator.close()
        for each in (self._router, *self._guests):
            each.close(0)
        self._context.term()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[GuardedEcho]:
    house = GuardedEcho(tmp_path)
    yield house
    house.close()


def test_a_trusted_key_opens(house: GuardedEcho) -> None:
    pair = new_pair()
    write_trusted(house.file, {pair.public: "a"})
    house.now += 1
    guest = house.guest(pair)
    house.live(lambda: bool(guest.poll(0)), "an answer")
    assert guest.recv() == b"hello"
    assert house.who == (pair.public, "127.0.0.1")
    assert not house.refusals.counts
    guest.close(0)
    following = house.guest(pair)
    house.live(lambda: bool(following.poll(0)), "an answer after a good end")
    assert not house.refusals.counts, "whoever had a key and went is no refusal"


def test_an_unknown_key_does_not(house: GuardedEcho) -> None:
    pair = new_pair()
    guest = house.guest(pair)
    house.live(lambda: house.refusals.counts["untrusted"] == 1, "a refusal")
    assert (guest.poll(0), house.received) == (0, [])
    [said] = house.said
    assert said.startswith("refused a connection or message of 127.0.0.1 (untrusted): ")
    assert pair.public in said and "house" in said
    assert house.refusals.counts["handshake"] == 0, "one refusal is counted once"


def test_neither_does_none_nor_one_for_somebody_else(house: GuardedEcho) -> None:
    pair = new_pair()
    write_trusted(house.file, {pair.public: "a"})
    house.now += 1
    for own, server in ((None, None), (pair, new_pair().public)):
        before = house.refusals.counts["handshake"]
        guest = house.guest(own, server)
        house.live(lambda b=before: house.refusals.counts["handshake"] > b, "a refusal")  # type: ignore[misc]
        assert guest.poll(0) == 0
        guest.close(0)
    assert house.received == []


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64])
def test_nor_does_what_is_no_zeromq_at_all(house: GuardedEcho, said: bytes) -> None:
    refused(house, said)


def test_nor_does_silence(tmp_path: Path) -> None:
    with closing(GuardedEcho(tmp_path, handshake_s=1.0)) as house:
        refused(house, b"")


def refused(house: GuardedEcho, said: bytes) -> None:
    """Somebody says this, and no more."""
    with socket.create_connection(("127.0.0.1", house.port)) as stranger:
        stranger.sendall(said)
        house.live(lambda: house.refusals.counts["handshake"] == 1, "a refusal")
    who, _, what = house.said[0].partition(" (")
    assert what == "handshake): it ended without a CURVE handshake at the house socket"
    peer = who.removeprefix("refused a connection or message of ")
    assert peer == "127.0.0.1" or said, (
        "only who was cut at once may be gone before it is looked up"
    )


def test_a_revoked_key_shuts_open_connections(house: GuardedEcho) -> None:
    pair, other = new_pair(), new_pair()
    write_trusted(house.file, {pair.public: "a", other.public: "b"})
    house.now += 1
    guest, friend = house.guest(pair), house.guest(other)
    house.live(lambda: bool(guest.poll(0) and friend.poll(0)), "two answers")
    write_trusted(house.file, {other.public: "b"})
    house.now += 1
    house.live(lambda: house.revoked == {pair.public}, "the revocation")
    for each in (guest, friend):
        each.recv()
        send_unless_refused(each, b"again")
    house.live(lambda: bool(friend.poll(0)), "the friend's answer")
    house.live(lambda: house.refusals.counts["revoked"] == 1, "the refusal")
    assert guest.poll(0) == 0
    assert house.received.count(b"again") == 1


def test_a_text_is_logged_again_only_after_a_while() -> None:
    said: list[str] = []
    now = 0.0
    throttle = LogThrottle(said.append, lambda: now)
    for _ in range(5):
        throttle("mac: spoke nonsense", "this")
    throttle("mac: was silent")
    throttle("other: spoke nonsense", "that")
    assert said == ["mac: spoke nonsense: this", "mac: was silent", "other: spoke nonsense: that"]
    now = QUIET_S
    throttle("mac: spoke nonsense", "more")
    assert said[-1] == "mac: spoke nonsense: more (4 more times since it was last logged)"


def test_a_flood_from_everywhere_is_counted_and_fills_no_log() -> None:
    said: list[str] = []
    now = 0.0
    refusals = Refusals(said.append, lambda: now)
    for number in range(5000):
        refusals.refuse(f"peer {number}", "nonsense", "x")
    assert refusals.counts == {"nonsense": 5000}
    assert len(said) == 1000
    now = QUIET_S
    refusals.refuse("peer 0", "nonsense", "x")
    assert len(said) == 1001


def test_addresses_are_told_as_people_know_them() -> None:
    assert plain_address("::ffff:10.0.0.1") == "10.0.0.1"
    assert plain_address("fe80::1") == "fe80::1"
