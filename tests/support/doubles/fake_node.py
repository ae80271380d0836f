"""A fake node for tests of the front end: fake workers that answer by a script, and a fake reaper
that publishes the status messages (rosters) which a test sets. The fakes are threads with real
sockets, so to a front end they look like a real node.

A script is a function that returns an iterator of steps for each request (``Submit``). The steps
are done in turn: a message is sent, a number is a pause in seconds, a threading.Event is waited
for, and ``DIE`` closes the worker's socket like the end of its process.
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
    Failed,
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
    """Returns a worker's message with one token of one choice; ``position`` is the token's index in
    the answer."""
    fields = {"ids": (token_id(position),), "text": text} | more
    return Tokens((Delta(submit.rid, submit.attempt, choice, position, **fields),))


def finish(submit: Submit, tokens: int = 0) -> Finish:
    return Finish(submit.rid, submit.attempt, "done", Usage(PROMPT_TOKENS, tokens, 2, 0))


def answer_words(*words: str, pause_s: float = 0.0, end: str = "stop") -> AnswerScript:
    """A fake worker's script: answers with one token per word, equal in every choice. A request
    that comes from a lost worker continues after the tokens that this worker had sent."""

    def script(submit: Submit) -> Iterator[ScriptStep]:
        yield accept(submit)
        n = submit.generation.n
        resume = submit.resume or ((),) * n
        todo = [choice for choice in range(n) if choice not in submit.finished]
        for choice in todo:
            if len(resume[choice]) == len(words or WORDS):  # only the end is missing
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
    """A fake worker's script: accepts the request, sends the first ``count`` words, and goes on
    with the script ``then``."""

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
    """A fake worker: a thread with a worker's socket that answers requests by its script.
    ``submits`` and ``cancels`` are the messages from front ends. A ``mute`` worker answers no ping;
    a ``deaf`` worker answers no request to tokenize a text, one with a ``failure`` fails at it."""

    def __init__(self, place: str, script: AnswerScript, pair: KeyPair | None = None) -> None:
        self.script = script
        self.submits: list[Submit] = []
        self.cancels: list[Cancel] = []
        self.mute = False
        self.deaf = False
        self.failure = ""
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
        self._socket.setsockopt(zmq.SNDHWM, 0)  # a full queue would drop messages silently
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
            case Tokenize(rid, attempt) if self.failure:
                self._send(peer, Failed(rid, attempt, "preparation", self.failure))
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
    """Makes a socket an encrypted (CURVE) server for every peer that knows its public key; does
    nothing without a key pair."""
    if pair is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)


class FakeNode:
    """A context manager for a fake node: its control socket, the socket on which it publishes its
    status (rosters), and its fake workers. ``asked`` is set when a peer has asked for the status.
    With a ``port`` the node uses TCP with encryption: control socket on this port, rosters on the
    next port, workers on the ports after; else it uses local (ipc) sockets."""

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
        """Returns the address, with the public key, by which a front end reaches this node over
        TCP."""
        assert self.pair is not None
        return f"tcp://{self.pair.public}@{host}:{self._port}"

    def worker(
        self, script: AnswerScript | None = None, *, slot: str = "", **more: Any
    ) -> FakeWorker:
        """Starts a fake worker and publishes it as ready; ``more`` are other fields of its status
        entry (SlotView)."""
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
        """Publishes a new status entry of a slot, in place of the slot's earlier entry."""
        with self._lock:
            others = tuple(slot for slot in self._roster.slots if slot.slot != view.slot)
            self._roster = replace(
                self._roster, revision=self._roster.revision + 1, slots=(*others, view)
            )
        self._changed.set()

    def change(self, **fields: Any) -> None:
        """Changes fields of the node's status message (roster) and publishes it."""
        with self._lock:
            self._roster = replace(self._roster, revision=self._roster.revision + 1, **fields)
        self._changed.set()

    @property
    def revision(self) -> int:
        """The revision number of the node's newest status message (roster), which may be about to
        be published."""
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
        """Publishes the loss of a slot's worker by a fault of this kind; ``suspects`` are the ids
        of the requests in the worker's last forward pass."""
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
