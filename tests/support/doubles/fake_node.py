"""A fake node: workers without an engine that follow a script, and a reaper that publishes the
rosters of a test. Threads and real sockets, so that a front end cannot tell.

A script is a generator made for each ``Submit``. Its steps are done in turn: a message is sent, a
number is a pause in seconds, an Event is waited for, ``DIE`` closes the worker's socket as the end
of its process would.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import zmq

from mayfly_protocol import PROTOCOL_MINOR
from mayfly_protocol.codec import encode, to_node, to_worker
from mayfly_protocol.lifecycle import ModelCard
from mayfly_protocol.roster import (
    ROSTER_TOPIC,
    Ask,
    Done,
    Loss,
    Quarantine,
    Quarantined,
    Release,
    Roster,
    SlotView,
    ToNode,
)
from mayfly_protocol.serving import (
    Accepted,
    Cancel,
    Delta,
    Detokenize,
    Detokenized,
    Finish,
    Ping,
    Pong,
    Submit,
    ToFrontEnd,
    Tokenize,
    Tokenized,
    Tokens,
    Usage,
)
from mayfly_protocol.transport.keys import KeyPair, new_pair

CARD = ModelCard(digest="d" * 64, context=4096, vocabulary=1000)
PROMPT_TOKENS = 7
WORDS = ("One", " two", " three", " four", " five")

DIE = object()
ScriptStep = ToFrontEnd | float | threading.Event | object
AnswerScript = Callable[[Submit], Iterator[ScriptStep]]


def token_id(position: int) -> int:
    return 100 + position


def accept(submit: Submit) -> Accepted:
    return Accepted(submit.rid, submit.attempt, PROMPT_TOKENS)


def step(submit: Submit, position: int, text: str, choice: int = 0, **more: Any) -> Tokens:
    """Returns the message with one choice's next token."""
    fields = {"ids": (token_id(position),), "text": text} | more
    return Tokens((Delta(submit.rid, submit.attempt, choice, position, **fields),))


def finish(submit: Submit, tokens: int = 0) -> Finish:
    return Finish(submit.rid, submit.attempt, "done", Usage(PROMPT_TOKENS, tokens, 2, 0))


def answer_words(*words: str, pause_s: float = 0.0, end: str = "stop") -> AnswerScript:
    """Script that answers a token a word, in every choice, and resumes where a lost worker
    ended."""

    def script(submit: Submit) -> Iterator[ScriptStep]:
        yield accept(submit)
        n = submit.generation.n
        resume = submit.resume or ((),) * n
        todo = [choice for choice in range(n) if choice not in submit.finished]
        for choice in todo:
            if len(resume[choice]) == len(words or WORDS):  # it lacked its end alone
                yield step(submit, len(words or WORDS), "", choice, ids=(), finish=end)
        for position, word in enumerate(words or WORDS):
            last = end if position == len(words or WORDS) - 1 else None
            for choice in todo:
                if position >= len(resume[choice]):
                    yield step(submit, position, word, choice, finish=last)
            yield pause_s
        yield finish(submit, n * len(words or WORDS))

    return script


def answer_then(count: int, then: AnswerScript, words: tuple[str, ...] = WORDS) -> AnswerScript:
    """Script that accepts, sends the first ``count`` words, and goes on with another script."""

    def script(submit: Submit) -> Iterator[ScriptStep]:
        yield accept(submit)
        for position in range(count):
            yield step(submit, position, words[position])
        yield from then(submit)

    return script


def die(submit: Submit) -> Iterator[ScriptStep]:
    yield DIE


@dataclass(slots=True)
class _Running:
    peer: bytes
    acts: Iterator[ScriptStep]
    due: float = 0.0
    gate: threading.Event | None = None


class FakeWorker:
    """A worker's socket without an engine. ``submits`` and ``cancels`` are messages from front
    ends. A ``mute`` worker answers no ping, a ``deaf`` one no question about tokens."""

    def __init__(self, place: str, script: AnswerScript, pair: KeyPair | None = None) -> None:
        self.script = script
        self.submits: list[Submit] = []
        self.cancels: list[Cancel] = []
        self.mute = False
        self.deaf = False
        self.endpoint = place
        self.pair = pair
        self._running: dict[tuple[str, int], _Running] = {}
        self._stop = threading.Event()
        self._bound = threading.Event()
        self._thread = threading.Thread(target=self._run, name=place, daemon=True)
        self._thread.start()
        assert self._bound.wait(5)

    def die(self) -> None:
        self._stop.set()
        self._thread.join(5)

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # a full queue would drop without a word
        _require_curve(self._socket, self.pair)
        self._socket.bind(self.endpoint)
        self._bound.set()
        try:
            while not self._stop.is_set():
                if self._socket.poll(2 if self._running else 20):
                    peer, frame = self._socket.recv_multipart()
                    self._receive(peer, frame)
                for key, running in list(self._running.items()):
                    self._go_on(key, running)
        finally:
            context.destroy(linger=0)

    def _receive(self, peer: bytes, frame: bytes) -> None:
        match to_worker.decode(frame):
            case Submit() as submit:
                self.submits.append(submit)
                key = (submit.rid, submit.attempt)
                self._running[key] = _Running(peer, iter(self.script(submit)))
            case Cancel() as cancel:
                self.cancels.append(cancel)
                if self._running.pop((cancel.rid, cancel.attempt), None):
                    self._send(peer, Finish(cancel.rid, cancel.attempt, "cancelled"))
            case Tokenize(rid, attempt, count_only=bare) if not self.deaf:
                ids = () if bare else tuple(map(token_id, range(PROMPT_TOKENS)))
                self._send(peer, Tokenized(rid, attempt, PROMPT_TOKENS, ids))
            case Detokenize(rid, attempt, ids=ids):
                self._send(peer, Detokenized(rid, attempt, " ".join(map(str, ids))))
            case Ping(token) if not self.mute:
                self._send(peer, Pong(token))

    def _go_on(self, key: tuple[str, int], running: _Running) -> None:
        while time.monotonic() >= running.due and not self._stop.is_set():
            if running.gate is not None and not running.gate.is_set():
                return
            running.gate = None
            act = next(running.acts, None)
            if act is None:
                self._running.pop(key, None)
                return
            if act is DIE:
                self._stop.set()
            elif isinstance(act, threading.Event):
                running.gate = act
            elif isinstance(act, float | int):
                running.due = time.monotonic() + act
            else:
                self._send(running.peer, act)

    def _send(self, peer: bytes, message: object) -> None:
        self._socket.send_multipart([peer, encode(message)])


def _require_curve(socket: zmq.Socket[bytes], pair: KeyPair | None) -> None:
    """Makes a socket a CURVE server, open to every peer that knows the public key."""
    if pair is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)


class FakeNode:
    """A node's control and roster sockets; a context manager. ``asked`` is set when a peer has sent
    an ``Ask``. With a ``port`` it is on TCP, with CURVE: control there, rosters on the next port,
    and workers on those that follow."""

    def __init__(self, model: str = "tiny", *, port: int = 0, name: str = "node") -> None:
        self.model = model
        self.asked = threading.Event()
        self.workers: list[FakeWorker] = []
        self._folder = Path(tempfile.mkdtemp(prefix="mayfly-"))
        self._port = port
        self.pair = new_pair() if port else None
        self.control = f"ipc://{self._folder}/node.ipc"
        self._places = (self.control, f"ipc://{self._folder}/roster.ipc")
        if port:
            self.control = self.address("127.0.0.1")
            self._places = (f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}")
        self._roster = Roster(name, f"epoch of {name}", 0, 1, (), minor=PROTOCOL_MINOR)
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._stop = threading.Event()
        self.silent = False
        self._thread = threading.Thread(target=self._run, name="fake node", daemon=True)

    def __enter__(self) -> FakeNode:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(5)
        for worker in self.workers:
            worker.die()
        shutil.rmtree(self._folder)

    def address(self, host: str) -> str:
        """Returns a front end's name for a node on TCP."""
        assert self.pair is not None
        return f"tcp://{self.pair.public}@{host}:{self._port}"

    def worker(
        self, script: AnswerScript | None = None, *, slot: str = "", **more: Any
    ) -> FakeWorker:
        """Starts a worker, ready for requests."""
        number = len(self.workers) + 1
        pair = new_pair() if self._port else None
        place = f"ipc://{self._folder}/w{number}.ipc"
        if self._port:
            place = f"tcp://127.0.0.1:{self._port + 1 + number}"
        worker = FakeWorker(place, script or answer_words(), pair)
        self.workers.append(worker)
        view = SlotView(
            slot or f"slot-{number}",
            self.model,
            "ready",
            number,
            pid=1000 + number,
            endpoint=worker.endpoint,
            public_key=pair.public if pair is not None else "",
            card=CARD,
        )
        self.show(replace(view, **more))
        return worker

    def show(self, view: SlotView) -> None:
        """Publishes a slot's view, in place of the one before."""
        with self._lock:
            others = tuple(slot for slot in self._roster.slots if slot.slot != view.slot)
            self._roster = replace(
                self._roster, revision=self._roster.revision + 1, slots=(*others, view)
            )
        self._changed.set()

    def change(self, **fields: Any) -> None:
        """Publishes a roster with other fields."""
        with self._lock:
            self._roster = replace(self._roster, revision=self._roster.revision + 1, **fields)
        self._changed.set()

    @property
    def revision(self) -> int:
        """The revision of the roster that is, or is about to be, published."""
        return self._roster.revision

    def view(self, slot: str) -> SlotView:
        return next(view for view in self._roster.slots if view.slot == slot)

    def _answer(self, router: zmq.Socket[bytes], peer: bytes, asked: ToNode) -> None:
        answer: Roster | Done = Done(True)
        match asked:
            case Ask():
                self.asked.set()
                answer = self._roster
            case Quarantine(fingerprint, kind, ttl_s):
                entry = Quarantined(fingerprint, kind, ttl_s)
                self.change(quarantined=(*self._roster.quarantined, entry))
            case Release():
                self.change(quarantined=())
        router.send_multipart([peer, encode(answer)])

    def lose(self, slot: str, kind: str, *, suspects: Sequence[str] = (), **more: Any) -> None:
        """Publishes the loss of a slot's worker, and the requests in its last forward pass."""
        view = self.view(slot)
        loss = Loss(slot, view.incarnation, kind, "worker", "", 0.0, tuple(suspects), **more)
        gone = replace(view, state="backoff", endpoint="", retry_in_s=0.1)
        with self._lock:
            others = tuple(each for each in self._roster.slots if each.slot != slot)
            losses = (*self._roster.losses, loss)
        self.change(slots=(*others, gone), losses=losses)

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        router, publisher = context.socket(zmq.ROUTER), context.socket(zmq.XPUB)
        for socket, place in zip((router, publisher), self._places, strict=True):
            _require_curve(socket, self.pair)
            socket.bind(place)
        published = 0.0
        while not self._stop.is_set():
            subscribed = bool(publisher.poll(0)) and bool(publisher.recv())
            if router.poll(10):
                peer, frame = router.recv_multipart()
                self._answer(router, peer, to_node.decode(frame))
            due = time.monotonic() - published > 0.3
            if (subscribed or due or self._changed.is_set()) and not self.silent:
                self._changed.clear()
                published = time.monotonic()
                with self._lock:
                    publisher.send_multipart([ROSTER_TOPIC, encode(self._roster)])
        context.destroy(linger=0)
