"""A fake node with one worker that computes nothing: each step gives every running request a token.

To a front end the fake node looks like a real one: it publishes its status each second, sends one
message per step with the tokens of all requests, runs a bounded number of requests and queues the
others. The fake node packs its message frames itself, so that it takes little CPU time from the
front end that is measured.

    python bench/fake_node.py FOLDER NAME --rows 16 --step-ms 20

With ``--stamp`` each token's text also says when it was sent: " tok@", a monotonic clock's seconds,
";". Steps are taken by the clock, so that nodes with different ``--phase-ms`` never step together.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import msgpack
import zmq

from mayfly_protocol import PROTOCOL_VERSION
from mayfly_protocol.codec import encode, to_worker
from mayfly_protocol.lifecycle import ModelCard
from mayfly_protocol.roster import ROSTER_INTERVAL_S, ROSTER_TOPIC, Roster, SlotView
from mayfly_protocol.serving import Accepted, Cancel, Finish, Ping, Pong, Submit, Usage
from mayfly_protocol.transport.sockets import configure

MODEL = "fake"
TOKEN = " tok"
PROMPT_TOKENS = 10


@dataclass(slots=True)
class Row:
    peer: bytes
    submit: Submit
    done: int = 0

    @property
    def limit(self) -> int:
        return self.submit.generation.ending.max_tokens or 1


class FakeNode:
    def __init__(
        self, folder: Path, name: str, rows: int, step_s: float, phase_s: float, stamp: bool
    ) -> None:
        self._name = name
        self._most = rows
        self._step_s = step_s
        self._phase_s = phase_s
        self._stamp = stamp
        self._rows: list[Row] = []
        self._waiting: deque[Row] = deque()
        self._revision = 0
        self._endpoint = f"ipc://{folder}/worker.ipc"
        context = zmq.Context()
        self._control = context.socket(zmq.ROUTER)
        self._roster = context.socket(zmq.XPUB)
        self._worker = context.socket(zmq.ROUTER)
        for socket in (self._control, self._roster, self._worker):
            configure(socket)
        self._control.bind(f"ipc://{folder}/node.ipc")
        self._roster.bind(f"ipc://{folder}/roster.ipc")
        self._worker.bind(self._endpoint)
        self._poller = zmq.Poller()
        for socket in (self._control, self._roster, self._worker):
            self._poller.register(socket, zmq.POLLIN)

    def run(self) -> None:
        publish_at = time.monotonic()
        step_at = publish_at + self._phase_s
        while True:
            now = time.monotonic()
            if now >= publish_at:
                self._publish()
                publish_at = now + ROSTER_INTERVAL_S
            if now >= step_at:
                self._step()
                step_at = max(step_at + self._step_s, now)
            due = min(publish_at, step_at)
            ready = dict(self._poller.poll(int(max(0.0, due - time.monotonic()) * 1000)))
            if self._roster in ready:
                self._roster.recv()
                self._publish()
            if self._control in ready:
                peer, _ = self._control.recv_multipart()
                self._control.send_multipart([peer, encode(self._picture())])
            if self._worker in ready:
                self._take_in()

    def _take_in(self) -> None:
        while self._worker.poll(0):
            peer, frame = self._worker.recv_multipart()
            match to_worker.decode(frame):
                case Submit() as submit:
                    self._say(peer, Accepted(submit.rid, submit.attempt, PROMPT_TOKENS))
                    self._waiting.append(Row(peer, submit))
                case Cancel(rid, attempt):
                    self._rows = [row for row in self._rows if row.submit.rid != rid]
                    self._say(peer, Finish(rid, attempt, "cancelled"))
                case Ping(token):
                    self._say(peer, Pong(token))
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._rows) < self._most:
            self._rows.append(self._waiting.popleft())

    def _step(self) -> None:
        text = f"{TOKEN}@{time.monotonic():.5f};" if self._stamp else TOKEN
        by_peer: dict[bytes, list[dict[str, object]]] = {}
        for row in self._rows:
            by_peer.setdefault(row.peer, []).append(
                {
                    "rid": row.submit.rid,
                    "attempt": row.submit.attempt,
                    "choice": 0,
                    "index": row.done,
                    "ids": (row.done,),
                    "text": text,
                    "finish": "length" if row.done + 1 == row.limit else None,
                }
            )
            row.done += 1
        for peer, deltas in by_peer.items():
            frame = msgpack.packb([PROTOCOL_VERSION, "Tokens", {"deltas": deltas}])
            self._worker.send_multipart([peer, frame])
        for row in self._rows:
            if row.done == row.limit:
                usage = Usage(PROMPT_TOKENS, row.done)
                self._say(row.peer, Finish(row.submit.rid, row.submit.attempt, "done", usage))
        self._rows = [row for row in self._rows if row.done < row.limit]
        self._fill()

    def _say(self, peer: bytes, message: object) -> None:
        self._worker.send_multipart([peer, encode(message)])

    def _publish(self) -> None:
        self._revision += 1
        self._roster.send_multipart([ROSTER_TOPIC, encode(self._picture())])

    def _picture(self) -> Roster:
        slot = SlotView(
            slot=f"{self._name}-0",
            model=MODEL,
            state="ready",
            incarnation=1,
            endpoint=self._endpoint,
            card=ModelCard(digest="f" * 64, context=1 << 20, vocabulary=1 << 20, rows=self._most),
            running=len(self._rows),
            waiting=len(self._waiting),
            progress=self._revision,
        )
        return Roster(self._name, "epoch", self._revision, 1, (slot,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--phase-ms", type=float, default=0.0)
    parser.add_argument("--stamp", action="store_true")
    options = parser.parse_args()
    FakeNode(
        options.folder,
        options.name,
        options.rows,
        options.step_ms / 1000,
        options.phase_ms / 1000,
        options.stamp,
    ).run()


if __name__ == "__main__":
    main()
