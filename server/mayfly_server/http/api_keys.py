"""API keys of clients, from environment variables and from a file that may change at any time.

Keys are random and long (:func:`new_key` makes 256 bits), so that they cannot be guessed, and only
their plain SHA-256 digests are stored. A keys file is TOML::

    [[keys]]
    name = "alice"
    sha256 = "9f86d081..."        # as `mayfly keys new` writes it
    requests_per_minute = 60      # optional
    concurrency = 4               # optional: requests at a time
    admin = true                  # optional: may operate and observe the server

Environment variables hold keys in clear text: MAYFLY_API_KEYS holds several keys, separated by
commas, MAYFLY_ADMIN_KEY holds one admin key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mayfly_protocol.common.file_watch import FileWatch
from mayfly_protocol.common.secrets import ADMIN_KEY_VARIABLE, API_KEYS_VARIABLE
from mayfly_protocol.transport.addresses import is_loopback

SHORTEST_KEY = 8
"""Least number of characters of an API key in an environment variable."""
HINT = "`mayfly keys new FILE NAME` adds a key to a file"
_NEEDED = (
    "set MAYFLY_API_KEYS or --api-keys-file (`mayfly keys new FILE NAME` makes a key), "
    "or say --insecure"
)

_log = structlog.get_logger(__name__)


def exposed_address(listener: socket.socket) -> str | None:
    """The address at which other machines can reach a listening socket; None if it is only
    reachable from this machine."""
    if listener.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    address: str = listener.getsockname()[0]
    return None if is_loopback(address) else address


def keys_needed(address: str) -> str:
    """The error text for a server without API keys that other machines could reach at
    ``address``."""
    return f"others could use this server at {address} without a key: {_NEEDED}"


class KeysError(Exception):
    """The configured API keys cannot be used. The text tells the operator why, and never holds a
    key."""


@dataclass(frozen=True, slots=True)
class Key:
    """An API key. ``name`` is its owner's, for logs; ``digest`` is the key's SHA-256;
    ``concurrency`` is the number of requests that it may have at a time. A limit of None means no
    limit."""

    name: str
    digest: bytes
    admin: bool = False
    requests_per_minute: int | None = None
    concurrency: int | None = None


def new_key() -> str:
    """A new random API key."""
    return f"mf-{secrets.token_urlsafe(32)}"


def digest_of(key: str) -> bytes:
    """The SHA-256 digest of an API key."""
    return hashlib.sha256(key.encode()).digest()


def find_key(keys: Iterable[Key], presented: Iterable[str]) -> Key | None:
    """The known key that equals one of the keys ``presented`` by a request; None if no key does.
    The search always takes equally long, so that its duration reveals nothing about the keys."""
    digests = [digest_of(candidate) for candidate in presented]
    found = None
    for key in keys:
        for digest in digests:
            if hmac.compare_digest(key.digest, digest):
                found = key
    return found


def from_environment(environment: Mapping[str, str]) -> tuple[Key, ...]:
    """Reads the API keys in the environment variables MAYFLY_API_KEYS and MAYFLY_ADMIN_KEY.

    Raises:
        KeysError: a variable is set and holds no key, a key that is too short, or a key with
            characters that no HTTP header can carry.
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
            if len(value) < SHORTEST_KEY:
                raise KeysError(
                    f"{variable}: key {number} can be guessed, as it is shorter than "
                    f"{SHORTEST_KEY} characters; `mayfly keys new FILE NAME` makes a long one"
                )
            name = "admin" if admin else f"environment-{number}"
            keys.append(Key(name, digest_of(value), admin=admin))
    return tuple(keys)


def file_entry(
    name: str,
    key: str,
    *,
    admin: bool = False,
    requests_per_minute: int | None = None,
    concurrency: int | None = None,
) -> str:
    """The TOML text that adds one API key, as its SHA-256, to the end of a keys file."""
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


def parse_keys_file(text: str) -> tuple[Key, ...]:
    """Reads the API keys in the text of a keys file. Raises KeysError, which names the wrong line
    or field and the problem."""
    try:
        entries = _File.model_validate(tomllib.loads(text)).keys
    except tomllib.TOMLDecodeError as error:
        raise KeysError(f"not TOML: {error}; {HINT}") from error
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise KeysError(
            f"{place}: {first['msg']}; {HINT}"
        ) from None  # the original error would show the input
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


def read_keys_file(path: Path) -> tuple[Key, ...]:
    """Reads the API keys in a file. Raises KeysError if the file cannot be used, or if others can
    write to it: whoever can, can give themselves a key."""
    try:
        with path.open(encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            text = file.read()
        if found.st_mode & 0o022:
            raise KeysError(
                f"others may write to it (mode {stat.S_IMODE(found.st_mode):o}); check the keys in "
                f"it, then: chmod go-w {path}"
            )
        if found.st_uid not in (0, os.geteuid()):
            raise KeysError(
                f"it belongs to user {found.st_uid}; it has to be this user's or root's"
            )
        return parse_keys_file(text)
    except OSError as error:
        raise KeysError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise KeysError(f"{path} is not UTF-8 text; {HINT}") from error
    except KeysError as error:
        raise KeysError(f"{path}: {error}") from error.__cause__


class Keyring:
    """All API keys that a server knows: the ``fixed`` keys, and the keys in ``file``, which can be
    read again when it changes.

    Raises:
        KeysError: the file cannot be used. A server that is configured to require keys must not
            start without them.
    """

    def __init__(self, fixed: tuple[Key, ...] = (), file: Path | None = None) -> None:
        self._fixed = fixed
        self._file = file
        self._watch = FileWatch(file) if file is not None else None
        self._read = read_keys_file(file) if file is not None else ()

    @property
    def required(self) -> bool:
        """True if keys are configured, so that requests have to present an API key."""
        return bool(self._fixed) or self._file is not None

    def find(self, presented: Iterable[str]) -> Key | None:
        """The known key that equals one of the keys that a request presented; None if there is
        none."""
        return find_key((*self._fixed, *self._read), presented)

    def reload_if_changed(self) -> None:
        """Reads the keys file again if it has changed. If it cannot be used, the previous keys stay
        in force, and an error is logged."""
        if self._file is None or self._watch is None or not self._watch.changed():
            return
        try:
            self._read = read_keys_file(self._file)
        except KeysError as error:
            _log.error("API keys not reloaded, the previous keys stay in force", reason=str(error))
            return
        _log.info("API keys reloaded", keys=[key.name for key in self._read])
