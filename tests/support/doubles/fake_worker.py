"""A fake worker process without MLX, for tests of the reaper (the workers' supervisor): speaks the
worker's side of the protocol with the reaper, and fails in the way that ``--behave`` names.

Run as the node's worker command; the reaper appends ``--settings JSON``. The failure starts
``--after`` seconds after the worker has reported Ready, and not before the file ``--once`` exists.
Failures while loading happen instead of Ready. Only the first ``--times`` worker processes of a
slot fail.

The fake worker packs its message frames itself rather than import the codec, because tests start
many of these processes and the import takes most of the start's time.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgpack
import zmq

from mayfly_protocol import PROTOCOL_VERSION
from mayfly_protocol.breadcrumb import BreadcrumbWriter
from mayfly_protocol.counters import Memory
from mayfly_protocol.lifecycle import (
    Beat,
    Bye,
    Cause,
    Exit,
    Fault,
    Hello,
    Loading,
    ModelCard,
    Ready,
)
from mayfly_protocol.transport.sockets import configure

SLOW_STEPS, SLOW_STEP_S = 24, 0.25
ABORT_TEXT = "[METAL] Command buffer execution failed: Caused GPU Timeout Error (0000000e)"


class FakeWorkerProcess:
    """The fake worker: one thread that watches stdin and the control socket, and sends
    heartbeats."""

    def __init__(self, settings: dict[str, Any], arguments: argparse.Namespace) -> None:
        self.settings = settings
        self.behaviour = arguments.behave if settings["incarnation"] <= arguments.times else "serve"
        self.after = arguments.after
        self.once = arguments.once
        self.weight_bytes = arguments.weight_bytes
        self.footprint = arguments.footprint
        self.busy = arguments.busy
        self.progress = self.inferences = 0
        self.context = zmq.Context()
        self.control: zmq.Socket[Any] = self.context.socket(zmq.DEALER)
        configure(self.control)
        self.control.setsockopt(zmq.LINGER, 20_000)
        self.control.setsockopt(
            zmq.ROUTING_ID, f"{settings['slot']}#{settings['incarnation']}".encode()
        )
        self.control.connect(settings["control"])
        self.listener: zmq.Socket[Any] = self.context.socket(zmq.ROUTER)
        configure(self.listener)
        self.listener.bind(settings["listen"])

    def send(self, message: Any) -> None:
        name = type(message).__name__
        self.control.send(msgpack.packb([PROTOCOL_VERSION, name, asdict(message)]))

    def leave(self, code: int, reason: str = "") -> None:
        self.send(Bye(code, reason))
        self.control.close()
        self.listener.close()
        self.context.term()  # waits until the Bye message is sent
        os._exit(code)

    def run(self) -> None:
        self.send(Hello(self.settings["slot"], self.settings["incarnation"], os.getpid()))
        self.send(Loading("loading", 1, 2))
        self.send(Beat(phase="loading", progress=0))
        match self.behaviour:
            case "configuration":
                self.leave(Exit.CONFIGURATION, "the model type 'gpt-17' is not known to mlx-lm")
            case "load-failed":
                self.leave(Exit.LOAD_FAILED, "model.safetensors is cut short")
            case "load-slowly":
                for done in range(SLOW_STEPS):
                    time.sleep(SLOW_STEP_S)
                    self.send(Loading("warming", done, SLOW_STEPS))
                self.behaviour = "serve"
            case "load-for-ever":
                self.serve_until(float("inf"), Beat(phase="loading", progress=0))
        self.send(Loading("canary", 2, 2))
        self.send(
            Ready(
                self.settings["listen"],
                ModelCard(digest="fake", weight_bytes=self.weight_bytes),
            )
        )
        deadline = time.monotonic() + self.after if self.behaviour != "serve" else float("inf")
        self.serve_until(deadline, None)
        while self.once is not None and not self.once.exists():
            self.serve_until(time.monotonic() + 0.02, None)
        self.misbehave()

    def misbehave(self) -> None:
        match self.behaviour:
            case "hang":
                self.serve_until(float("inf"), Beat(phase="decode", progress=7, running=1))
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "fault":
                first = Cause("RuntimeError", "[METAL] the first", "Traceback ...")
                later = (Cause("RuntimeError", "cleanup"),)
                self.send(Fault("metal_timeout", "worker", first, later, ("r1", "r2"), ("r1",)))
                self.leave(Exit.POISONED)
            case "abort":
                print(
                    "terminate called after throwing an instance of 'std::runtime_error'",
                    file=sys.stderr,
                )
                print(f"  what():  {ABORT_TEXT}", file=sys.stderr, flush=True)
                os.abort()
            case "crash":
                crumb = BreadcrumbWriter(Path(self.settings["breadcrumb"]))
                crumb.write("decode", 5, ["old", "new"], ["new"])
                os.kill(os.getpid(), signal.SIGSEGV)
            case "batch-faults":
                cause = Cause("RuntimeError", "[malloc] Unable to allocate 17 bytes.")
                for _ in range(2):
                    self.send(Fault("allocation_failed", "batch", cause))
                self.serve_until(float("inf"), None)
            case "recycle":
                self.leave(Exit.RECYCLED, "worn")
            case "deaf":  # ignores Drain and SIGTERM
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                self.serve_until(float("inf"), None, deaf=True)
            case "eat":  # allocates memory until it is killed
                eaten = []
                while True:
                    eaten.append(b"." * (16 << 20))
                    self.send(self.beat())

    def serve_until(self, deadline: float, stuck: Beat | None, deaf: bool = False) -> None:
        """Until ``deadline``, sends heartbeats, obeys the message Drain (unless ``deaf``), and
        exits when stdin is closed. With ``stuck``, every heartbeat is this one, as from an engine
        that makes no progress."""
        poller = zmq.Poller()
        poller.register(self.control, zmq.POLLIN)
        poller.register(0, zmq.POLLIN)
        while time.monotonic() < deadline:
            self.send(stuck or self.beat())
            left = min(deadline - time.monotonic(), self.settings["beat_interval_s"])
            ready = dict(poller.poll(max(0, int(left * 1000))))
            if 0 in ready and not os.read(0, 1):
                while self.has_work():
                    time.sleep(0.02)
                os._exit(Exit.ORPHANED)
            if self.control in ready:
                assert msgpack.unpackb(self.control.recv())[1] == "Drain"
                if not deaf and stuck is None:
                    self.leave(Exit.BYE)

    def beat(self) -> Beat:
        self.progress += 1
        self.inferences += not self.has_work()
        # The reaper takes the first footprint for the need of the next worker, and starts none
        # that the machine has no memory for.
        footprint = self.footprint if self.progress > 1 else min(self.footprint, 1 << 20)
        return Beat(
            phase="idle",
            progress=self.progress,
            inferences=self.inferences,
            memory=Memory(footprint=footprint),
        )

    def has_work(self) -> bool:
        return self.busy is not None and self.busy.exists()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--behave", default="serve")
    parser.add_argument("--after", type=float, default=0.0)
    parser.add_argument("--once", type=Path)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--weight-bytes", type=int, default=0)
    parser.add_argument("--footprint", type=int, default=1 << 20)
    parser.add_argument("--busy", type=Path, help="while this file exists, the work does not end")
    parser.add_argument("--settings", required=True)
    arguments = parser.parse_args()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(Exit.BYE))
    FakeWorkerProcess(json.loads(arguments.settings), arguments).run()


if __name__ == "__main__":
    main()
