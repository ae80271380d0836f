"""A fake Hugging Face Hub: the HTTP routes that the Hub's client needs to download a repository.

::

    GET  /api/models/R[/revision/main]    the repository's description
    GET  /api/models/R/tree/COMMIT        its files, as a list
    HEAD /R/resolve/COMMIT/FILE           size and hash
    GET  /R/resolve/COMMIT/FILE           the file, or a part of it

Set the environment variable ``HF_ENDPOINT`` to :attr:`FakeHub.url` in a new process: the Hub's
client reads the variable only once per process.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """The state of a fake Hugging Face Hub: ``repositories`` maps each repository to its files.
    Requests for files of ``gated`` repositories are refused. Files in ``broken`` end after half
    their bytes, as if the connection were lost; a test may take them out of the set again."""

    repositories: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    url: str = ""
    served: list[str] = field(default_factory=list)
    """Names of the files that were sent, in order, partly sent files included."""


@contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    class Handler(_Handler):
        the_hub = hub

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    the_hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/\w+)?", path):
            self._about(match[1], as_tree=False)
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/\w+", path):
            self._about(match[1], as_tree=True)
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/\w+/(.+)", path):
            self._file(match[1], match[2])
        else:
            self._refuse(404, "EntryNotFound")

    def _about(self, repository: str, *, as_tree: bool) -> None:
        files = self.the_hub.repositories.get(repository)
        if files is None:
            self._refuse(401, "RepoNotFound")
            return
        listing: Any
        if as_tree:
            listing = [
                {"type": "file", "path": name, "size": len(content), "oid": _hash(content)}
                for name, content in files.items()
            ]
        else:
            siblings = [{"rfilename": n, "size": len(c)} for n, c in files.items()]
            listing = {"id": repository, "sha": COMMIT, "siblings": siblings}
        self._send(200, json.dumps(listing).encode(), {"Content-Type": "application/json"})

    def _file(self, repository: str, name: str) -> None:
        if repository in self.the_hub.gated:
            self._refuse(403, "GatedRepo")
            return
        content = self.the_hub.repositories[repository][name]
        headers = {"ETag": f'"{_hash(content)}"', "X-Repo-Commit": COMMIT}
        first = int((self.headers.get("Range") or "bytes=0-")[6:].split("-")[0])
        if self.command == "GET":
            self.the_hub.served.append(name)
        if self.command == "GET" and name in self.the_hub.broken:
            self.close_connection = True
            self._send(200, content[first : len(content) // 2], headers, claimed=len(content))
        else:
            self._send(206 if first else 200, content[first:], headers)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": "no"})

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], claimed: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if claimed is None else claimed))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _hash(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
