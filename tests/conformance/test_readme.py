"""The commands of the README and of docs/getting-started.md, run as they stand.

A scripted model takes the place of the demo model, by the environment alone: the same name, on the
port that both pages name. Words in capitals, which stand for the reader's own, are filled in.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.models import scripted
from support.models.scripted import ScriptedReply
from support.server import free_port, wait_for

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
PORT = 8000
URL = f"http://127.0.0.1:{PORT}"
PATIENCE_S = 60.0
ASK = "curl http://127.0.0.1:8000/v1/chat/completions"
ANSWER = "The capital of France is Paris."
LOG = "RuntimeError: [METAL] Command buffer execution failed: Caused GPU Timeout Error"

BLOCKS = [
    (match[1], match[2])
    for page in (README, GUIDE)
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", page, re.M | re.S)
]
COMMANDS = re.findall(r"^\| `(mayfly [^`]+)`", GUIDE, re.M)

OWN = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("XDG_", "MAYFLY_", "MAKE", "MFLAGS"))
    and name not in ("ARGS", "EXTRA", "PYTHON")
}
"""A reader's environment: not that of the make which may have started the tests."""

NOT_RUN = {
    "pip install .": "installs from a package index",
    "mayfly drill": "takes a minute; tests/chaos has it",
    "mayfly service install serve": "would change this machine; it has tests of its own",
}


def block(beginning: str, language: str = "sh") -> str:
    """Returns the block of code that begins so. Both pages may show it, in the same words."""
    [found] = {text for kind, text in BLOCKS if kind == language and text.startswith(beginning)}
    return found


class ReaderShell:
    """A shell for the commands of both pages, with a folder and a home of its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        replies = [ScriptedReply("capital of France", ANSWER)]
        # Slow enough for a worker to be killed in the middle of the README's 300 tokens.
        self.model = scripted.build(folder / "model", replies, step_s=0.02)
        self.environment = {
            **OWN,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "HF_HUB_OFFLINE": "1",
            "MAYFLY_MODEL": str(self.model),
            "MAYFLY_NAME": "SmolLM2-135M-Instruct",
            "MAYFLY_TRUST_REMOTE_CODE": "true",
            "MAYFLY_PRELOAD_BLAS": "false",
        }

    def run(self, command: str, said: str = "", **environment: str) -> str:
        """Runs a command that has to succeed, and returns its output."""
        ran = subprocess.run(
            ["sh", "-e", "-c", command],
            cwd=self.folder,
            env={**self.environment, **environment},
            input=said,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
        return ran.stdout

    @contextlib.contextmanager
    def running(
        self, command: str, name: str, folder: Path | None = None, **environment: str
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Runs a command for the length of a block; Ctrl-C stops it, if nothing else has."""
        with self.log(name).open("wb") as output:
            process = subprocess.Popen(
                ["sh", "-c", f"exec {command}"],
                cwd=folder or self.folder,
                env={**self.environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that Ctrl-C reaches all of it, as in a terminal
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
            process.wait(30)

    @contextlib.contextmanager
    def serving(
        self, command: str, port: int = PORT, folder: Path | None = None, **environment: str
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A server on this port, ready."""
        name = f"serve-{port}"
        with self.running(command, name, folder, **environment) as process:
            wait_for(lambda: self._ready(process, port, name), "a ready server", PATIENCE_S)
            yield process

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _ready(self, process: subprocess.Popen[bytes], port: int, name: str) -> bool:
        assert process.poll() is None, self.log(name).read_text(errors="replace")
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
        return False


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> ReaderShell:
    return ReaderShell(tmp_path_factory.mktemp("reader"))


@pytest.fixture(scope="module")
def server(reader: ReaderShell) -> Iterator[subprocess.Popen[bytes]]:
    """The server that the last line of the section without make starts."""
    needs_port(PORT)
    command = block("pip install .").splitlines()[-1]
    assert command == "mayfly serve"
    with reader.serving(command) as process:
        yield process


def needs_port(port: int) -> None:
    try:
        socket.create_server(("0.0.0.0", port)).close()
    except OSError:
        pytest.skip(f"port {port}, which the pages name, is taken on this machine")


def test_every_block_is_looked_after() -> None:
    """A new one needs a test here, or a reason in NOT_RUN."""
    beginnings = [text.splitlines()[0].split("  ")[0] for _, text in BLOCKS]
    assert beginnings == [
        "make serve",
        "curl http://127.0.0.1:8000/v1/chat/completions \\",
        "curl -sN http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' "
        """-d '{"prompt": "Once upon a time",""",
        "ID",
        'make serve ARGS="mlx-community/Qwen3-4B-4bit --port 9000"',
        ". .venv/bin/activate",
        "pip install .",
        "curl http://127.0.0.1:8000/v1/chat/completions \\",
        "from openai import OpenAI",
        "from anthropic import Anthropic",
        "mayfly keys new keys.toml alice",
        "mayfly config init",
        "port = 9000",
        "mac-2$",
    ]


def test_curl(reader: ReaderShell, server: object) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    assert ANSWER in reader.run(block(ASK))


@pytest.mark.parametrize("package", ["openai", "anthropic"])
def test_python(reader: ReaderShell, server: object, package: str) -> None:
    script = reader.folder / f"with_{package}.py"
    script.write_text(block(f"from {package} ", "python"))
    assert reader.run(f"python {script}").strip() == ANSWER


def test_keys(reader: ReaderShell) -> None:
    """On a port of its own, since the other server has the pages' port."""
    port = free_port()
    make, serve = (line.split("#")[0] for line in block("mayfly keys").splitlines())
    key = reader.run(make).split()[-1]
    environment = {"MAYFLY_PORT": str(port), "MAYFLY_STATE_DIR": str(reader.folder / "keyed")}
    with reader.serving(serve, port, **environment):
        models = f"http://127.0.0.1:{port}/v1/models"
        assert httpx.get(models).status_code == 401
        assert httpx.get(models, headers={"authorization": f"Bearer {key}"}).status_code == 200
        chat = f"mayfly chat --url http://127.0.0.1:{port}"
        assert ANSWER in reader.run(chat, "What is the capital of France?\n", MAYFLY_API_KEY=key)


def test_configuration(reader: ReaderShell) -> None:
    init, show = block("mayfly config").splitlines()
    folder = reader.folder / "configured"
    folder.mkdir()
    reader.run(f"cd {folder} && {init}")
    assert "max_rows" in (folder / "mayfly.toml").read_text()
    assert "MAYFLY_MODEL" in reader.run(f"cd {folder} && {show}")
    (folder / "models" / "my-own").mkdir(parents=True)
    (folder / "mayfly.toml").write_text(block("port = 9000", "toml"))
    bare = "unset MAYFLY_MODEL MAYFLY_NAME"
    shown = reader.run(f"{bare}; cd {folder} && {show}")
    assert re.search(r"^port = 9000 +# .*mayfly.toml$", shown, re.M)
    assert f'path = "{folder}/models/my-own"' in shown


def test_two_servers_side_by_side(reader: ReaderShell, server: object) -> None:
    needs_port(8001)
    [command] = re.findall(r"`(mayfly serve --port 8001 [^`]+)`", GUIDE)
    with reader.serving(command, 8001):
        assert httpx.get("http://127.0.0.1:8001/v1/models").status_code == 200
        assert httpx.get(f"{URL}/readyz").status_code == 200


def test_an_answer_outlives_its_worker(reader: ReaderShell, server: object) -> None:
    """The README's demonstration: the answer is that of an undisturbed run."""
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    demonstration = block("curl -sN")
    undisturbed = text_of(reader.run(demonstration.partition(" > story.txt")[0]))
    assert undisturbed
    printed = reader.run(demonstration)
    story = (reader.folder / "story.txt").read_text()
    assert story.rstrip().endswith("data: [DONE]")
    assert text_of(story) == undisturbed
    assert "killed" in printed
    shown, _, _ = block("ID", "text").partition("\n")
    assert printed.split("\n")[0].split() == shown.split()


def text_of(stream: str) -> str:
    """The text of a stream of completions."""
    events = re.findall(r"^data: (\{.*)$", stream, re.M)
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["text"] for choice in choices)


def test_the_environment_is_activated() -> None:
    if not (ROOT / ".venv" / "bin" / "activate").exists():
        pytest.skip("there is no environment in .venv")
    command = f"{block('. .venv')} command -v mayfly"
    ran = subprocess.run(["sh", "-c", command], cwd=ROOT, env=OWN, capture_output=True, text=True)
    assert ran.stdout.strip() == str(ROOT / ".venv" / "bin" / "mayfly")


def test_make_serves_another_model() -> None:
    """Checks the command that make would run: the model would have to be fetched."""
    command = block("make serve ARGS").replace("make ", "make -n ", 1)
    ran = subprocess.run(["sh", "-c", command], cwd=ROOT, env=OWN, capture_output=True, text=True)
    last = ran.stdout.splitlines()[-1]
    assert last == ".venv/bin/mayfly serve mlx-community/Qwen3-4B-4bit --port 9000"


def test_a_killed_worker_has_a_successor(reader: ReaderShell, server: object) -> None:
    assert "`kill -9 PID`" in GUIDE
    [before] = httpx.get(f"{URL}/mayfly/status").json()["nodes"][0]["slots"]
    reader.run(f"kill -9 {before['pid']}")

    def replaced() -> bool:
        [now] = httpx.get(f"{URL}/mayfly/status").json()["nodes"][0]["slots"]
        return now["state"] == "ready" and now["pid"] != before["pid"]

    wait_for(replaced, "the successor")
    if shutil.which("curl"):
        assert ANSWER in reader.run(block(ASK))


EXPECTED = {
    "mayfly serve [MODEL]": "--host",
    "mayfly status": "ready",
    "mayfly top": "1 of 1 ready",
    "mayfly chat": ANSWER,
    "mayfly launch AGENT": "export ANTHROPIC_BASE_URL",
    "mayfly doctor [MODEL]": "SEQUENCES AT ONCE",
    "mayfly recycle SLOT": "recycling",
    "mayfly quarantine list": "nothing is in quarantine",
    "mayfly faults": "killed",
    "mayfly faults explain < LOG": "metal_timeout",
    "mayfly keys new FILE NAME": "",
    "mayfly config show": "port = 8000",
    "mayfly version": "mlx",
    "mayfly drain": "draining",
}
"""Every command of the table, and what it is to print; the one that ends the server last."""


BETWEEN_MACHINES = ("mayfly node [MODEL]", "mayfly front --node ADDRESS", "mayfly keys init")
"""The part of the manual that :func:`test_several_machines` runs."""


def test_the_table_of_commands_is_looked_after() -> None:
    not_run = {each for each in NOT_RUN if each.startswith("mayfly")}
    assert set(COMMANDS) == {*EXPECTED, *BETWEEN_MACHINES, *not_run}


@pytest.mark.parametrize("command", EXPECTED)
def test_a_command(
    reader: ReaderShell, server: subprocess.Popen[bytes], tiny_model: Path, command: str
) -> None:
    (reader.folder / "gpu.log").write_text(f"{LOG}\n")
    slot = httpx.get(f"{URL}/mayfly/status").json()["nodes"][0]["slots"][0]["slot"]
    own = {"LOG": "gpu.log", "SLOT": slot, "FILE": "more.toml", "NAME": "bob", "AGENT": "claude"}
    typed = re.sub(r"\b(LOG|SLOT|FILE|NAME|AGENT)\b", lambda word: own[word[1]], command)
    typed = typed.replace("[MODEL]", str(tiny_model))
    if command.startswith("mayfly serve"):
        typed = "mayfly serve --help"  # one runs already
    if command == "mayfly top":
        typed += " --once"  # there is no terminal to watch in
    if command == "mayfly launch AGENT":
        typed += " --print"  # the agent is not installed
    said = "What is the capital of France?\n" if command == "mayfly chat" else ""
    assert EXPECTED[command] in reader.run(typed, said)
    if command == "mayfly drain":
        assert server.wait(30) == 0


def test_make_serves_and_ctrl_c_stops_it(reader: ReaderShell) -> None:
    """Runs only if the environment that make manages exists; make would create it here
    otherwise."""
    made = subprocess.run(["make", "-q", ".venv/.runtime"], cwd=ROOT, env=OWN, capture_output=True)
    if made.returncode != 0:
        pytest.skip("make would install into .venv first")
    needs_port(PORT)
    with reader.serving(block("make serve\n").strip(), folder=ROOT) as process:
        assert httpx.get(f"{URL}/v1/models").json()["data"][0]["id"] == "SmolLM2-135M-Instruct"
    assert process.returncode in (0, -signal.SIGINT)  # make ends as Ctrl-C has it end
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{URL}/livez")


def test_several_machines(tmp_path: Path) -> None:
    """Two homes on this machine, which also has to answer for the name of the one with the node."""
    for wanted in (7700, 7701, 7710):
        needs_port(wanted)
    machines = {
        "mac-2$": ReaderShell(tmp_path / "mac-2"),
        "gateway$": ReaderShell(tmp_path / "gateway"),
    }
    lines = [line.split("#")[0].split(maxsplit=1) for line in block("mac-2$").splitlines()]
    keys: dict[str, str] = {}
    port = free_port()
    with contextlib.ExitStack() as stack:
        for prompt, command in lines:
            machine = machines[prompt]
            [other] = machines.keys() - {prompt}
            typed = command.strip().replace("KEY", keys.get(other, "KEY"))
            typed = typed.replace("mlx-community/Qwen3-4B-4bit", str(machine.model))
            typed = typed.replace("mac-2.local", "127.0.0.1")
            if command.startswith("mayfly keys"):
                said = re.search(r"\b[0-9a-f]{64}\b", machine.run(typed))
                keys.setdefault(prompt, said[0] if said else "")
            elif command.startswith("mayfly node"):
                stack.enter_context(machine.running(typed, "node"))
            else:
                started = machine.serving(typed, port, MAYFLY_PORT=str(port))
                stack.enter_context(started)
        ask = f"mayfly chat --url http://127.0.0.1:{port}"
        assert ANSWER in machines["gateway$"].run(ask, "What is the capital of France?\n")
