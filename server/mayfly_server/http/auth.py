"""The keys that open a server: those of its environment, and those of a file that may change while
it runs.

Who can reach a listening socket.

API keys: where they come from, and which of them a request was sent with.

Keys are random and long (:func:`new_key` draws 256 bits), so their plain SHA-256 is all that is
stored: there is nothing to guess. A keys file is TOML::

    [[keys]]
    name = "alice"
    sha256 = "9f86d081..."        # as `mayfly keys new` writes it
    requests_per_minute = 60      # optional
    concurrency = 4               # optional: requests at a time
    admin = true                  # optional: may operate and observe the server

Keys of the environment stand there in clear: MAYFLY_API_KEYS holds some, separated by commas,
MAYFLY_ADMIN_KEY one that is an admin's.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mayfly_protocol.common.secrets import ADMIN_KEY_VARIABLE, API_KEYS_VARIABLE
from mayfly_protocol.transport.addresses import is_loopback

HOW = (
    "set MAYFLY_API_KEYS or --api-keys-file (`mayfly keys new FILE NAME` makes a key), "
    "or say --insecure"
)


def exposed(listener: socket.socket) -> str | None:
    """The address at which others can reach a listening socket, if they can."""
    if listener.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    address: str = listener.getsockname()[0]
    return None if is_loopback(address) else address


def refusal(address: str) -> str:
    """Why a server without keys does not start there."""
    return f"others could use this server at {address} without a key: {HOW}"


HINT = "`mayfly keys new FILE NAME` adds a key to a file"


class KeysError(Exception):
    """Keys that cannot be used; the text is for the operator and never holds a key."""


@dataclass(frozen=True, slots=True)
class Key:
    """``digest`` is the key's SHA-256. Limits that are None do not limit."""

    name: str
    digest: bytes
    admin: bool = False
    requests_per_minute: int | None = None
    concurrency: int | None = None


def new_key() -> str:
    return f"mf-{secrets.token_urlsafe(32)}"


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def find(keys: Iterable[Key], presented: Iterable[str]) -> Key | None:
    """The key that one of ``presented`` is. Takes as long whether there is one or not, and
    whichever it is."""
    digests = [digest_of(candidate) for candidate in presented]
    found = None
    for key in keys:
        for digest in digests:
            if hmac.compare_digest(key.digest, digest):
                found = key
    return found


def from_environment(environment: Mapping[str, str]) -> tuple[Key, ...]:
    """The keys in :data:`API_KEYS_VARIABLE` and :data:`ADMIN_KEY_VARIABLE`.

    Raises:
        KeysError: a variable that is set holds no key, or one holds characters that no header can.
    """
    keys = []
    for variable, admin in ((API_KEYS_VARIABLE, False), (ADMIN_KEY_VARIABLE, True)):
        if variable not in environment:
            continue
        text = environment[variable]
        values = [text.strip()] if admin else [part.strip() for part in text.split(",")]
        values = [value for value in values if value]
        if not values:
            raise KeysError(f"{variable} is set, but holds no key")
        for number, value in enumerate(values, start=1):
            if not (value.isascii() and value.isprintable() and " " not in value):
                raise KeysError(f"{variable}: key {number} has characters that no header can carry")
            name = "admin" if admin else f"environment-{number}"
            keys.append(Key(name, digest_of(value), admin=admin))
    return tuple(keys)


def entry(
    name: str,
    key: str,
    *,
    admin: bool = False,
    requests_per_minute: int | None = None,
    concurrency: int | None = None,
) -> str:
    """A keys file's text about one key."""
    lines = ["", "[[keys]]", f'name = "{name}"', f'sha256 = "{digest_of(key).hex()}"']
    if admin:
        lines.append("admin = true")
    if requests_per_minute is not None:
        lines.append(f"requests_per_minute = {requests_per_minute}")
    if concurrency is not None:
        lines.append(f"concurrency = {concurrency}")
    return "\n".join([*lines, ""])


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.@-]{1,64}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    admin: bool = False
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    concurrency: Annotated[int, Field(ge=1)] | None = None


class _File(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    keys: Annotated[list[_Entry], Field(min_length=1)]


def parse(text: str) -> tuple[Key, ...]:
    """The keys in a keys file's text. Raises KeysError, saying where and what is wrong."""
    try:
        entries = _File.model_validate(tomllib.loads(text)).keys
    except tomllib.TOMLDecodeError as error:
        raise KeysError(f"not TOML: {error}; {HINT}") from error
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise KeysError(f"{place}: {first['msg']}; {HINT}") from None  # it would show the input
    names = [entry.name for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise KeysError(f"two keys are called {name!r}")
    return tuple(
        Key(
            entry.name,
            bytes.fromhex(entry.sha256),
            entry.admin,
            entry.requests_per_minute,
            entry.concurrency,
        )
        for entry in entries
    )


def read(path: Path) -> tuple[Key, ...]:
    """The keys in a file. Raises KeysError."""
    try:
        return parse(path.read_text())
    except OSError as error:
        raise KeysError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise KeysError(f"{path} is not UTF-8 text; {HINT}") from error
    except KeysError as error:
        raise KeysError(f"{path}: {error}") from error.__cause__


LOOK_INTERVAL_S = 1.0

_log = structlog.get_logger(__name__)


class Keyring:
    """Reads ``file`` at once. Raises KeysError where that does not work: a server that was meant
    to be locked must not start open."""

    def __init__(self, fixed: tuple[Key, ...] = (), file: Path | None = None) -> None:
        self._fixed = fixed
        self._file = file
        self._seen = _stamp(file)
        self._read = read(file) if file is not None else ()

    @property
    def locked(self) -> bool:
        """Whether anything needs a key."""
        return bool(self._fixed) or self._file is not None

    def find(self, presented: Iterable[str]) -> Key | None:
        return find((*self._fixed, *self._read), presented)

    def look(self) -> None:
        """Reads the file again if it has changed. One that cannot be used changes nothing: the
        keys that were known go on being known, and the log says why."""
        stamp = _stamp(self._file)
        if self._file is None or stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._read = read(self._file)
        except KeysError as error:
            _log.error("the keys stay as they were", reason=str(error))
            return
        _log.info("keys read again", keys=[key.name for key in self._read])

    async def watch(self) -> None:
        """Looks again and again, until it is cancelled."""
        while self._file is not None:
            await asyncio.sleep(LOOK_INTERVAL_S)
            await asyncio.to_thread(self.look)


def _stamp(file: Path | None) -> tuple[int, int, int] | None:
    """What changes when a file does, or is replaced by another."""
    try:
        found = file.stat() if file is not None else None
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino) if found else None
