"""Sockets that a server opens, and hostile messages on them. docs/reported-faults.md lists the ids
in test names."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import stat
import tokenize
from pathlib import Path
from typing import Any

import httpx
import psutil
import zmq

from mayfly_protocol.codec import encode
from mayfly_protocol.lifecycle import Bye
from mayfly_protocol.serving import Pong
from support.api_client import CHAT, PATHS, body, post, user
from support.server import Server, serving

ROOT = Path(__file__).parents[2]


def test_R143_errors_say_nothing_of_the_machine(script: Server, fussy: Server) -> None:
    """Every kind of error that a client can provoke, and the end of a worker."""
    secrets = [
        *(str(path) for path in (Path.home(), ROOT, script.folder, script.state_dir)),
        *(str(path.parent) for path in (fussy.folder, script.folder)),
        "Traceback",
        'File "',
        "site-packages",
        os.environ.get("USER") or "no user",
    ]
    seen: list[str] = []

    def note(response: httpx.Response) -> None:
        assert response.status_code >= 400 or response.headers["content-type"].startswith("text/")
        seen.append(f"{response.headers} {response.text}")

    for path in PATHS:
        for fields in (
            {"model": "nonsense"},
            {"temperature": "hot"},
            {"stop": [""]},
            {"logit_bias": {"99999999": 1}},
            {"guided_regex": "("},
            {"guided_grammar": "nonsense"},
            {"guided_json": {"type": "nonsense"}},
            {"messages": [user("word " * 5000)]} if path == CHAT else {"prompt": "word " * 5000},
            {"messages": [{"role": "dog"}]} if path == CHAT else {"prompt": [10**9]},
        ):
            note(post(script, path, **fields))
    note(post(fussy, CHAT, messages=[{"role": "assistant", "content": "x"}, user("hi")]))
    for method, path in (("GET", "/nonsense"), ("PUT", CHAT), ("POST", "/v1/embeddings")):
        note(script.http.request(method, path))
    note(script.http.post(CHAT, content=b"\xff", headers={"content-type": "application/json"}))
    note(script.http.get("/livez", headers={"host": "evil.example"}))
    for streamed in (False, True):
        dying = body(script, CHAT, messages=[user("[short of memory]")], stream=streamed)
        note(script.post(CHAT, dying))
    text = "\n".join(seen)
    for secret in secrets:
        assert secret not in text, secret


def listening(server: Server) -> list[Any]:
    return [
        connection
        for process in server.processes()
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN or connection.type == 2
    ]


def ipc_paths(server: Server) -> list[str]:
    paths = {
        connection.laddr
        for process in server.processes()
        for connection in process.net_connections(kind="unix")
        if isinstance(connection.laddr, str) and connection.laddr.endswith(".ipc")
    }
    return sorted(paths)


def test_R135_nothing_listens_but_the_http_port(tiny: Server) -> None:
    assert {connection.laddr for connection in listening(tiny)} == {("127.0.0.1", tiny.port)}
    paths = ipc_paths(tiny)
    assert len(paths) >= 3
    for path in paths:
        folder = Path(path).parent.stat()
        assert stat.S_IMODE(folder.st_mode) == 0o700
        assert folder.st_uid == os.getuid()


class PickleBomb:
    """An object whose unpickling would write a file."""

    def __init__(self, marker: Path) -> None:
        self._command = (os.system, (f"touch {marker}",))

    def __reduce__(self) -> Any:
        return self._command


def test_R135_nonsense_on_internal_sockets_changes_nothing(tiny: Server, tmp_path: Path) -> None:
    pids = {process.pid for process in tiny.processes()}
    nonsense = [
        [os.urandom(100)],
        [b""],
        [b""] * 20,
        *([b"x"] * count for count in range(1, 21)),
        [os.urandom(50 << 20)],
        [pickle.dumps(PickleBomb(tmp_path / "marker"))],
        [pickle.dumps(PickleBomb(tmp_path / "marker"), protocol=0)],
        [encode(Bye(0))],
        [encode(Pong(1))],
        [encode(Pong(1)).replace(b"Pong", b"Pwng")],
        [b"\x93\x01\xa6Submit\x80"],
        [b"\x93\x01\xa6Submit\xc0"],
        [b"\x93\xcb" + b"\x00" * 8],
        [b"\x91" * 10_000],
    ]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        for path in ipc_paths(tiny):
            for kind in (zmq.DEALER, zmq.SUB if path.endswith("roster.ipc") else zmq.REQ):
                with context.socket(kind) as socket:
                    socket.setsockopt(zmq.LINGER, 1000)
                    socket.setsockopt(zmq.SNDTIMEO, 1000)
                    socket.connect(f"ipc://{path}")
                    for frames in nonsense if kind == zmq.DEALER else nonsense[:1]:
                        with contextlib.suppress(zmq.Again, zmq.ZMQError):
                            socket.send_multipart(frames)
    finally:
        context.term()
    for _ in range(3):
        assert tiny.chat().choices[0].finish_reason == "length"
    assert {process.pid for process in tiny.processes()} == pids
    assert tiny.slot()["incarnation"] == 1
    assert not (tmp_path / "marker").exists()


FORBIDDEN = re.compile(
    r"\b(pickle|cPickle|dill|cloudpickle|marshal|shelve)\b|recv_pyobj|send_pyobj|yaml\.load\b"
    r"|(?<![\w.])(eval|exec)\(|jsonpickle"
)


def test_R135_nothing_on_the_wire_is_ever_run() -> None:
    """Comments and texts may speak of it."""
    silent = (tokenize.STRING, tokenize.COMMENT)
    found = []
    for package in ("protocol", "worker", "server"):
        for path in (ROOT / package).rglob("*.py"):
            with path.open("rb") as file:
                words = [t.string for t in tokenize.tokenize(file.readline) if t.type not in silent]
            code = " ".join(words[1:]).replace(" . ", ".").replace(" (", "(")
            found += [(path.name, match[0]) for match in FORBIDDEN.finditer(code)]
    assert found == []


def test_R127_keys_stay_with_the_front_end(tools_model: Path, tmp_path: Path) -> None:
    """Keys are not on a command line, in a worker's environment or in the log. With keys, other
    machines may reach the server."""
    key = "unique-key-4711-of-a-client"
    environment = {"MAYFLY_API_KEYS": key, "MAYFLY_ADMIN_KEY": f"{key}-admin"}
    with serving(tools_model, tmp_path, "--host", "0.0.0.0", environment=environment) as server:
        assert {c.laddr for c in listening(server)} == {("0.0.0.0", server.port)}
        assert server.http.get("/v1/models").status_code == 401
        server.http.headers["authorization"] = f"Bearer {key}-admin"
        server.client.api_key = key
        assert server.chat().choices[0].finish_reason == "length"
        assert len(server.slots()) == 1
        processes = server.processes()
        assert len(processes) == 3
        for process in processes:
            assert key not in " ".join(process.cmdline())
            if "mayfly_worker" in process.cmdline():
                assert key not in str(process.environ())
        assert key not in server.log()
        for path in server.state_dir.rglob("*"):
            assert not path.is_file() or key.encode() not in path.read_bytes()


def test_S23_keys_that_cross_a_network_in_the_clear_are_said(
    tools_model: Path, tmp_path: Path
) -> None:
    warning = "cross the network unencrypted"
    environment = {"MAYFLY_API_KEYS": "unique-key-4711-of-a-client"}
    for host, said in (("0.0.0.0", True), ("127.0.0.1", False)):
        folder = tmp_path / host
        folder.mkdir()
        with serving(tools_model, folder, "--host", host, environment=environment) as server:
            assert (warning in server.log()) == said


def test_without_keys_others_are_kept_out(tools_model: Path, tmp_path: Path) -> None:
    with serving(tools_model, tmp_path, "--host", "0.0.0.0", wait=False) as server:
        assert server.process.wait(30) == 1
        assert "without a key" in server.log()
        assert "--insecure" in server.log()
