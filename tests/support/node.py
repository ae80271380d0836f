"""Runs a node (reaper, the supervisor of workers, with fake workers) as a process of its own, and
watches the status messages that it publishes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from types import TracebackType
from typing import Any

import psutil
import zmq

from mayfly_protocol.codec import encode, from_node, rosters
from mayfly_protocol.roster import ROSTER_TOPIC, Roster, SlotView
from mayfly_reaper.paths import runtime_of

DOUBLES = Path(__file__).parent / "doubles"
PATIENCE_S = 20.0
REFUSED = 2
"""The exit status of a node that could not start."""


def fake_worker(*arguments: str) -> list[str]:
    return [sys.executable, str(DOUBLES / "fake_worker.py"), *arguments]


def fake_front_end() -> list[str]:
    return [sys.executable, str(DOUBLES / "fake_front_end.py"), "{fd}"]


class RunningNode:
    """A context manager for a node's process; at its end all processes of the node are killed.

    Without an ``audience`` the test closes the pipe to which the node prints its events.
    ``last_words_s`` are the seconds that the node waits for a worker's last messages after the
    worker's exit: more than by default, because on a busy test machine the messages may be late.
    """

    def __init__(
        self,
        state_dir: Path,
        worker: Sequence[str] = (),
        *,
        workers: int = 1,
        budgets: dict[str, float] | None = None,
        lifetime: dict[str, float] | None = None,
        front_end: Sequence[str] = (),
        port: int = 0,
        preload_blas: bool = False,
        audience: bool = True,
        metrics: int | None = None,
        last_words_s: float | None = None,
    ) -> None:
        self.state_dir = state_dir
        self.runtime = runtime_of(state_dir)
        settings = {
            "state_dir": str(state_dir),
            "workers": workers,
            "options": {"beat_interval_s": 0.1},
            "front_end": list(front_end),
            "port": port,
            "budgets": budgets or {},
            "lifetime": lifetime or {},
            "worker_command": list(worker or fake_worker()),
            "preload_blas": preload_blas,
            "metrics": metrics,
            "last_words_s": last_words_s,
        }
        self._command = [sys.executable, str(DOUBLES / "run_node.py"), json.dumps(settings)]
        self._audience = audience
        self._lines: Queue[list[Any]] = Queue()
        self._events: list[list[Any]] = []
        self._children: dict[int, psutil.Process] = {}

    def __enter__(self) -> RunningNode:
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        if not self._audience:
            assert self.process.stdout is not None
            self.process.stdout.close()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._context = zmq.Context()
        self.subscriber = self._context.socket(zmq.SUB)
        self.subscriber.subscribe(ROSTER_TOPIC)
        self.subscriber.connect(self.runtime.roster)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.children()
        self._end()
        for child in self._children.values():
            if child.is_running():
                child.kill()
        self._reader.join()
        assert self.process.stdout is not None and self.process.stderr is not None
        self.process.stdout.close()
        self.process.stderr.close()
        self.subscriber.close(0)
        self._context.term()

    def _end(self) -> None:
        """Ends the node's process: SIGTERM, again SIGTERM, then SIGKILL, with 5 s after each."""
        for signal in (self.process.terminate, self.process.terminate, self.process.kill):
            signal()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
                break
        if self.process.returncode != REFUSED and self.runtime.folder.exists():
            shutil.rmtree(self.runtime.folder)  # left behind by a killed node

    def _read(self) -> None:
        if self._audience and self.process.stdout is not None:
            for line in self.process.stdout:
                self._lines.put(json.loads(line))

    def children(self) -> list[psutil.Process]:
        """Returns the node's running child processes; they are killed at the end of the test."""
        try:
            found = psutil.Process(self.process.pid).children()
        except psutil.NoSuchProcess:
            found = []
        self._children.update({child.pid: child for child in found})
        return found

    def roster(self, wanted: Callable[[Roster], bool], patience_s: float = PATIENCE_S) -> Roster:
        """Waits for the first published roster (the node's status message) that fulfils a
        condition, and returns it."""
        deadline = time.monotonic() + patience_s
        last: Roster | None = None
        while (left := deadline - time.monotonic()) > 0:
            if self.subscriber.poll(int(left * 1000)):
                last = rosters.decode(self.subscriber.recv_multipart()[1])
                if wanted(last):
                    self.children()
                    return last
        raise AssertionError(f"no such roster; the last one: {last}; heard: {self.events()}")

    def slot(self, wanted: Callable[[SlotView], bool]) -> SlotView:
        """Waits until the node's only slot fulfils a condition, and returns the slot's entry in the
        node's status message."""
        return self.roster(lambda roster: wanted(roster.slots[0])).slots[0]

    def ready(self, incarnation: int = 1) -> SlotView:
        return self.slot(lambda view: view.state == "ready" and view.incarnation >= incarnation)

    def ask(self, message: object) -> Any:
        """Sends a message to the node's control socket, and returns the answer."""
        with self._context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(self.runtime.control)
            socket.send(encode(message))
            assert socket.poll(int(PATIENCE_S * 1000)), "no answer"
            return from_node.decode(socket.recv())

    def events(self) -> list[list[Any]]:
        """Returns all events that the node has printed so far: slots that changed, notes for the
        operator."""
        while True:
            try:
                self._events.append(self._lines.get_nowait())
            except Empty:
                return self._events

    def refusal(self) -> str:
        """Waits for the exit of a node that refuses to start, and returns its stderr."""
        assert self.process.stderr is not None
        assert self.process.wait(PATIENCE_S) == REFUSED
        return self.process.stderr.read()

    def all_events(self) -> list[list[Any]]:
        """Returns all events that the node, which has to have ended, has printed."""
        self._reader.join(PATIENCE_S)
        return self.events()

    def wait_for(self, *beginning: object) -> list[Any]:
        """Waits for the first event whose first words are ``beginning``, and returns it."""
        deadline = time.monotonic() + PATIENCE_S
        seen = 0
        while time.monotonic() < deadline:
            for words in self.events()[seen:]:
                if words[: len(beginning)] == list(beginning):
                    return words
            seen = len(self._events)
            time.sleep(0.01)
        raise AssertionError(f"heard no {beginning}: {self._events}")

    def wait_for_note(self, part: str) -> str:
        """Waits for the first note to the operator that contains ``part``, and returns its text."""
        found: list[str] = []

        def heard() -> bool:
            notes = (words[1] for words in self.events() if words[0] == "note")
            found.extend(note for note in notes if part in note)
            return bool(found)

        wait_until(heard, f"a note with {part!r}")
        return found[0]

    def autopsies(self) -> list[dict[str, Any]]:
        path = self.state_dir / "autopsies.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        text: str = response.read().decode()
    return text


def wait_until(condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.01)
