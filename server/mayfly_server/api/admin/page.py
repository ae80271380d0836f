"""The live web page that shows all workers: ``GET /``, and the page's scripts, styles and images.

The files need no API key, because they contain nothing about this server: the page asks its user
for a key and sends the key with each request for data. A content security policy keeps the page
from loading anything from other hosts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from pathlib import PurePath

from fastapi import APIRouter, Request, Response

router = APIRouter(include_in_schema=False)

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # cached but revalidated: a new version shows at once
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    etag: str


def _load() -> Mapping[str, _File]:
    found = {}
    for file in files("mayfly_server").joinpath("page").iterdir():
        content = file.read_bytes()
        etag = f'"{sha256(content).hexdigest()[:32]}"'
        path = "/" if file.name == "index.html" else f"/page/{file.name}"
        found[path] = _File(content, _TYPES[PurePath(file.name).suffix], etag)
    return found


_FILES = _load()

PATHS = frozenset(_FILES)
"""The URL paths of the web page's files; served without an API key."""


async def _serve(request: Request) -> Response:
    file = _FILES[request.scope["path"]]
    headers = {**_HEADERS, "etag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


for _path in sorted(PATHS):
    router.add_api_route(_path, _serve, methods=["GET", "HEAD"])
