"""Runs a real worker (inference process); the test plays its reaper, which supervises it, and a
front end, which sends it requests."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import zmq

from mayfly_protocol import codec
from mayfly_protocol.counters import Memory
from mayfly_protocol.lifecycle import Beat, Ready, ToReaper
from mayfly_protocol.requests import Ending, Generation, Output, Sampling, TextPrompt
from mayfly_protocol.serving import (
    Delta,
    Failed,
    Finish,
    Handover,
    Rejected,
    Submit,
    ToFrontEnd,
    Tokens,
    ToWorker,
)
from mayfly_protocol.settings import WorkerSettings, worker_settings
from mayfly_protocol.transport import sockets

T = TypeVar("T")
TERMINAL = (Rejected, Finish, Failed, Handover)
DEADLINE_S = 30.0


def generation(prompt: Any = "Once upon a time", **options: Any) -> Generation:
    """Returns a greedy request for 8 tokens; ``options`` are fields of Generation or of its parts
    Sampling, Ending and Output."""
    parts: dict[type, dict[str, Any]] = {
        Sampling: {"seed": 0, "temperature": 0.0},
        Ending: {},
        Output: {},
    }
    rest: dict[str, Any] = {}
    parts[Ending]["max_tokens"] = 8
    for name, value in options.items():
        home = next((t for t in parts if name in t.__dataclass_fields__), None)
        (parts[home] if home else rest)[name] = value
    return Generation(
        model="test",
        prompt=TextPrompt(prompt) if isinstance(prompt, str) else prompt,
        sampling=Sampling(**parts[Sampling]),
        ending=Ending(**parts[Ending]),
        output=Output(**parts[Output]),
        **rest,
    )


@dataclass
class AttemptAnswer:
    """All messages that a worker has sent about one try of a request."""

    rid: str
    messages: list[ToFrontEnd] = field(default_factory=list)

    @property
    def deltas(self) -> list[Delta]:
        return [d for m in self.messages if isinstance(m, Tokens) for d in m.deltas]

    def text(self, choice: int = 0) -> str:
        return "".join(d.text for d in self.deltas if d.choice == choice)

    def ids(self, choice: int = 0) -> list[int]:
        return [i for d in self.deltas if d.choice == choice for i in d.ids]

    def finish(self, choice: int = 0) -> str | None:
        ends = [d.finish for d in self.deltas if d.choice == choice and d.finish]
        assert len(ends) <= 1
        return ends[0] if ends else None

    @property
    def end(self) -> Rejected | Finish | Failed | Handover | None:
        ends = [m for m in self.messages if isinstance(m, TERMINAL)]
        assert len(ends) <= 1, "exactly one terminal message a request and attempt"
        return ends[0] if ends else None


class WorkerProcess:
    """A context manager for a worker's process and the sockets to talk to it; at its end the
    process is killed."""

    def __init__(self, model: Path, folder: Path, **options: Any) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self.control = self._context.socket(zmq.ROUTER)
        sockets.configure(self.control)
        # The path of an ipc socket may have about a hundred characters.
        run = Path("/tmp") / f"mayfly-test-{uuid.uuid4().hex[:12]}"
        run.mkdir(mode=0o700)
        self._run = run
        self.control.bind(f"ipc://{run}/control")
        settings = WorkerSettings(
            slot="test/0",
            incarnation=1,
            control=f"ipc://{run}/control",
            model_path=str(model),
            model_name="test",
            **{"listen": f"ipc://{run}/worker", **options},
        )
        self.stderr = (folder / f"stderr-{uuid.uuid4().hex[:8]}").open("w+b")
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "mayfly_worker",
                "--settings",
                worker_settings().dump_json(settings).decode(),
            ],
            stdin=subprocess.PIPE,
            stderr=self.stderr,
        )
        self.received: list[ToReaper] = []
        self.name = b""
        self.front = self.front_end()
        self.answers: dict[tuple[str, int], AttemptAnswer] = {}
        self._rids = itertools.count()

    def front_end(self) -> zmq.Socket[Any]:
        """Returns a new, unconnected socket like a front end's. (:meth:`wait_ready` connects the
        socket ``front``.)"""
        socket = self._context.socket(zmq.DEALER)
        sockets.configure(socket)
        socket.setsockopt(zmq.ROUTING_ID, uuid.uuid4().bytes)
        return socket

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.stderr.close()
        self._context.destroy(linger=0)
        for path in self._run.iterdir():
            path.unlink()
        self._run.rmdir()

    def listen(self, timeout_s: float = 0.05) -> None:
        """Receives at most one message from the worker on each socket; waits up to ``timeout_s``
        seconds if there is none."""
        poller = zmq.Poller()
        poller.register(self.control, zmq.POLLIN)
        poller.register(self.front, zmq.POLLIN)
        for socket, _ in poller.poll(timeout_s * 1000):
            if socket is self.control:
                self.name, frame = self.control.recv_multipart()
                self.received.append(codec.to_reaper.decode(frame))
            else:
                self._record(codec.to_front_end.decode(self.front.recv()))

    def _record(self, message: ToFrontEnd) -> None:
        if isinstance(message, Tokens):
            for delta in message.deltas:
                answer = self.answers[delta.rid, delta.attempt]
                answer.messages.append(Tokens((delta,)))
        elif hasattr(message, "rid"):
            self.answers[message.rid, message.attempt].messages.append(message)

    def wait(self, condition: Callable[[], T], what: str = "the condition") -> T:
        """Receives the worker's messages until ``condition`` returns a true value, and returns that
        value; fails after 30 s."""
        deadline = time.monotonic() + DEADLINE_S
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise AssertionError(f"waited in vain for {what}; stderr:\n{self.log()}")
            self.listen()
        return value

    def log(self) -> str:
        self.stderr.flush()
        return Path(self.stderr.name).read_text(errors="replace")[-4000:]

    def received_of(self, kind: type[T]) -> list[T]:
        return [m for m in self.received if isinstance(m, kind)]

    def memory(self) -> Memory:
        """Waits for the worker's next heartbeat message, and returns the memory figures in it."""
        seen = len(self.received_of(Beat))
        self.wait(lambda: len(self.received_of(Beat)) > seen, "a beat")
        return self.received_of(Beat)[-1].memory

    def wait_ready(self) -> Ready:
        def ready() -> list[Ready]:
            assert self.process.poll() is None, f"the worker has left:\n{self.log()}"
            return self.received_of(Ready)

        [found] = self.wait(ready, "Ready")
        self.front.connect(found.endpoint)
        return found

    def send(self, message: ToWorker) -> None:
        self.front.send(codec.encode(message))

    def send_as_reaper(self, message: object) -> None:
        """Sends the worker a message on the socket of its supervisor, the reaper."""
        self.control.send_multipart([self.name, codec.encode(message)])

    def submit(self, wanted: Generation, **options: Any) -> AttemptAnswer:
        submit = Submit(f"r{next(self._rids)}", options.pop("attempt", 1), wanted, **options)
        answer = self.answers[submit.rid, submit.attempt] = AttemptAnswer(submit.rid)
        self.send(submit)
        return answer

    def ask(self, wanted: Generation, **options: Any) -> AttemptAnswer:
        answer = self.submit(wanted, **options)
        self.wait(lambda: answer.end, "the end of the answer")
        return answer

    def wait_exit(self) -> int:
        return self.wait(
            lambda: (self.process.poll(),)[0] is not None and (self.process.returncode,), "exit"
        )[0]
