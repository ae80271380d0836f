"""Released agents and SDKs, installed once and run against a scripted model.

Their versions are pinned in ``tests/agents/package.json``. They are installed into a folder of the
user's cache, which is made anew when the lock file changes, and run with a home of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import platformdirs

from support.models import scripted, tokenizer
from support.models.scripted import ModelFault, ScriptedReply
from support.network_namespaces import CLONE_NEWNET
from support.server import Server, serving

AGENTS = Path(__file__).parent.parent / "agents"
LARGE = 200_000
"""Tokens of a context that no session fills."""
CLIENT_S = 180.0
"""Seconds that a client may take for a turn."""

POEM = "".join(f"{n} green bottles hanging on the wall,\n" for n in range(12, 0, -1))
"""A file that agents write. Its call has some 250 tokens."""
PRINT = (
    "echo . >> rounds; seq -s ' ' 1 1000; n=$(wc -l < rounds); echo rounds: $((n < 7 ? n : 7)) of 7"
)
"""A command whose output has some 2,400 tokens, and says how often it was run."""
NOTES = "colour: red\nshape: round\n"

STRICT = tokenizer.TEMPLATES["thinking"].replace(
    "{%- if message.role == 'system' %}",
    "{%- if message.role == 'system' %}\n"
    "{%- if not loop.first %}"
    "{{- raise_exception('System message must be at the beginning.') }}{% endif %}",
)
"""A template as Qwen's: it refuses any system message but the first."""
assert "raise_exception('System" in STRICT
TEMPLATES = {"lenient": tokenizer.TEMPLATES["thinking"], "strict": STRICT}


def install() -> Path:
    """Returns the ``node_modules`` of the pinned releases; installs them the first time."""
    manifest = [AGENTS / "package.json", AGENTS / "package-lock.json"]
    key = hashlib.sha256(b"".join(path.read_bytes() for path in manifest)).hexdigest()[:12]
    cache = platformdirs.user_cache_path("mayfly-test-agents", ensure_exists=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (cache / key).exists():
            part = cache / f"{key}.part"
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            for path in manifest:
                shutil.copy(path, part)
            # Not `ci`: it insists on packages for every platform, and not all are to be had.
            command = ["npm", "install", "--ignore-scripts", "--no-save", "--no-audit", "--no-fund"]
            subprocess.run(command, cwd=part, stdin=subprocess.DEVNULL, check=True)
            part.rename(cache / key)
    return cache / key / "node_modules"


@contextlib.contextmanager
def loopback_alone() -> Iterator[None]:
    """Moves the main thread, and processes that it starts, into a network namespace that has a
    loopback interface alone. Does nothing but on Linux, as root."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/thread-self/ns/net").open() as before:
        if libc.unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            yield
        finally:
            libc.setns(before.fileno(), CLONE_NEWNET)


def call(name: str, **arguments: Any) -> str:
    """Returns a tool call as the scripted model's tokenizer knows it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def killed(at: int) -> list[ModelFault]:
    """A SIGKILL of the worker, once, when it has made so many tokens of the reply."""
    return [ModelFault(at=at, action="kill", times=1)]


def png(red: int, green: int, blue: int, size: int = 32) -> bytes:
    """Returns a square picture of one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    rows = (b"\0" + bytes((red, green, blue)) * size) * size
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


@dataclass(frozen=True)
class Model:
    """A scripted model of a server: its replies, its context, its template."""

    replies: Sequence[ScriptedReply]
    context: int = LARGE
    template: str = STRICT


@contextlib.contextmanager
def serving_models(folder: Path, models: Mapping[str, Model]) -> Iterator[Server]:
    for name, model in models.items():
        scripted.build(
            folder / name,
            model.replies,
            context=model.context,
            tokenizer="thinking",
            template=model.template,
        )
    paths = json.dumps([{"path": str(folder / name), "name": name} for name in models])
    # A worker that was killed is replaced after a pause that doubles with each loss.
    options = ("--models", paths, "--trust-remote-code", "--retry-max", "1")
    with serving(None, folder, *options, wait=False) as server:
        server.wait_ready(60)
        yield server


@dataclass(frozen=True)
class Output:
    """The output of a client: lines of JSON on its stdout, and anything on its stderr."""

    events: list[dict[str, Any]]
    errors: str

    def __str__(self) -> str:
        """Returns the whole without the many small steps of an answer, each event in a line."""
        whole = [str(event) for event in self.events if event.get("type") != "stream_event"]
        return "\n".join([*(line[:2000] for line in whole), self.errors[-4000:]])

    def of_type(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("type") in kinds]


class Client:
    """A released client with a home and a working folder of its own."""

    def __init__(self, folder: Path, modules: Path) -> None:
        self.home = folder / "home"
        self.work = folder / "work"
        for each in (self.home, self.work):
            each.mkdir(parents=True)
        self._modules = modules

    def program(self, pattern: str) -> str:
        """Returns the path of an installed program for this machine. Of several the longest is
        taken: ``-baseline`` runs on processors of any age."""
        found = [str(path) for path in self._modules.glob(pattern)]
        assert found, f"there is no {pattern} for this machine in {self._modules}"
        return max(found, key=len)

    def run(
        self, *command: str, environment: Mapping[str, str] | None = None, status: int = 0
    ) -> Output:
        """Runs a program to its end, and asserts its exit status; a script (``.js``, ``.mjs``) is
        run by the installed Node."""
        node = self.program("node-*/bin/node")
        script = command[0].endswith("js")
        done = subprocess.run(
            [*([node] if script else []), *command],
            cwd=self.work,
            env={
                "PATH": f"{Path(node).parent}:{os.environ['PATH']}",
                "HOME": str(self.home),
                "NO_COLOR": "1",
                **(environment or {}),
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CLIENT_S,
            check=False,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        output = Output([json.loads(line) for line in lines], done.stderr)
        assert done.returncode == status, f"ended with {done.returncode}: {output}"
        return output


def printing(call: str, *others: str) -> list[ScriptedReply]:
    """Returns replies that run ``PRINT`` seven times by a call, at the words ``[numbers]``, or at
    ``others`` that continue."""
    rounds = [f"rounds: {n} of 7" for n in range(1, 7)]
    return [
        *(ScriptedReply(trigger, call) for trigger in ("[numbers]", *others, *rounds)),
        ScriptedReply("rounds: 7 of 7", "Those were all numbers."),
    ]


class Sessions(ABC):
    """An agent and a server. Its models are ``lenient`` and ``strict``, which have these templates,
    and ``small``, whose context a session outgrows. Each has a home and a working folder."""

    def __init__(self, server: Server, clients: Mapping[str, Client]) -> None:
        self.server = server
        self.clients = clients

    @classmethod
    @contextlib.contextmanager
    def begun(
        cls,
        folder: Path,
        modules: Path,
        replies: Callable[[Path], list[ScriptedReply]],
        small: int,
        others: Sequence[str] = (),
    ) -> Iterator[Self]:
        """Runs a server whose models give ``replies(working folder)``; ``small`` is the context of
        the small one, and ``others`` are names of further ones."""
        names = {**TEMPLATES, **dict.fromkeys(("small", *others), STRICT)}
        clients = {name: Client(folder / f"{name}-client", modules) for name in names}
        models = {}
        for name, client in clients.items():
            (client.work / "notes.txt").write_text(NOTES)
            (client.work / "red.png").write_bytes(png(255, 0, 0))
            context = small if name == "small" else LARGE
            models[name] = Model(replies(client.work), context, names[name])
        with serving_models(folder, models) as server:
            yield cls(server, clients)

    def launch(self, model: str, agent: str, program: str, *arguments: str) -> Output:
        """Runs an agent by ``mayfly launch``, with settings that are made by it alone; the agent is
        the installed ``program``."""
        client = self.clients[model]
        folder = client.home / "bin"
        folder.mkdir()
        (folder / agent).symlink_to(client.program(program))
        node = Path(client.program("node-*/bin/node")).parent
        return client.run(
            *(sys.executable, "-m", "mayfly_cli", "launch", agent),
            *("--url", self.server.url, "--model", model, "--", *arguments),
            environment={
                "PATH": f"{folder}:{node}:{os.environ['PATH']}",
                "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            },
        )

    @abstractmethod
    def turn(self, model: str, prompt: str, *options: str, status: int = 0) -> Output:
        """Runs one turn, from a prompt to the end of the answer and of all tool calls in it; the
        client's exit status has to be ``status``."""

    def losses(self, model: str) -> int:
        """Returns the number of lost workers of a model."""
        return sum(loss["slot"] == f"{model}-0" for loss in self.server.autopsies())


def refusals(server: Server) -> dict[str, int]:
    """Returns the number of answers with each status of an error, by route and status."""
    text = server.http.get("/metrics").text
    counts: dict[str, int] = {}
    for line in text.splitlines():
        if line.startswith("mayfly_http_requests_total{"):
            labels, _, count = line.rpartition(" ")
            status = labels.partition('status="')[2][:3]
            if status >= "400" and "/v1/" in labels:
                counts[labels.partition("{")[2].rstrip("}")] = int(float(count))
    return counts
