"""Messages that a worker receives at its sockets."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
import zmq

from mayfly_protocol import codec
from mayfly_protocol.serving import Ping, ToWorker
from mayfly_protocol.settings import WorkerSettings
from mayfly_protocol.transport import keys, sockets
from mayfly_protocol.transport.keys import make_pair, write_trusted
from mayfly_worker import wire as wires
from mayfly_worker.wire import Wire
from support.server import free_ports

A_ROUND, FLOOD = 10, 37


@pytest.mark.parametrize("guarded", [False, True], ids=["plain", "guarded"])
def test_a_flood_is_taken_in_by_rounds(
    tmp_path: Path, guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two of them the worker beats, so that its reaper knows it alive. The rounds are small
    here, so that a whole one surely lies there, however slowly it arrives."""
    monkeypatch.setattr(wires, "FRAMES_A_ROUND", A_ROUND)
    front = make_pair(tmp_path)
    trusted = keys.trusted_file(tmp_path)
    write_trusted(trusted, {front.public: "front"})
    wire = Wire(
        WorkerSettings(
            slot="s",
            incarnation=1,
            control="inproc://nobody",
            model_path="/nowhere",
            model_name="m",
            listen=f"tcp://127.0.0.1:{free_ports(1)}",
            trusted=str(trusted) if guarded else "",
        )
    )
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        sockets.configure(dealer)
        if guarded:
            sockets.connect_curve(dealer, front, wire.public_key)
        dealer.connect(wire.listen().replace("*", "127.0.0.1"))
        for number in range(FLOOD):
            dealer.send(codec.encode(Ping(number)), zmq.NOBLOCK)
        rounds: list[list[ToWorker]] = []
        deadline = time.monotonic() + 30
        while sum(map(len, rounds)) < FLOOD and time.monotonic() < deadline:
            wire.authenticate()
            wire.router.poll(50)
            rounds.append([message for _, message in wire.receive_from_front_ends()])
        wire.close(0)
    assert [*itertools.chain(*rounds)] == [Ping(number) for number in range(FLOOD)]
    assert max(map(len, rounds)) == A_ROUND
