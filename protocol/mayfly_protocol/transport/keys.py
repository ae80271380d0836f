"""CURVE keys of nodes and front ends, and the list of trusted keys.

Every node and every front end has a CURVE key pair, in its state directory::

    <state directory>/wire/secret     32 bytes in hex, readable by this user alone (mode 0600)
                           trusted    peers that may connect, one a line: public key, name

Keys are written in hex, which needs no quoting in any shell or file. The key pair of a worker is
made by the worker's own process and never written to disk.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from mayfly_protocol.common.file_watch import FileWatch
from mayfly_protocol.transport.addresses import KEY_DIGITS, is_key

HOW = "`mayfly keys init` makes one"
_HEAD = "# Who may connect to this machine's node: a public key and a name on each line.\n"
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")


class IdentityError(Exception):
    """Error for a key, or a list of trusted keys, that cannot be used; the message is for the
    operator and never holds a secret."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair. ``public`` is in hex; ``secret`` is 32 bytes, and left out of the pair's
    repr."""

    public: str
    secret: bytes = field(repr=False)


def new_pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(z85.decode(public).hex(), z85.decode(secret))


def secret_file(state_dir: Path) -> Path:
    return state_dir / "wire" / "secret"


def trusted_file(state_dir: Path) -> Path:
    return state_dir / "wire" / "trusted"


def read_pair(state_dir: Path) -> KeyPair | None:
    """Reads this machine's key pair from its state directory; None if the machine has none.

    Raises:
        IdentityError: other users can read the file, or the file holds no key.
    """
    path = secret_file(state_dir)
    try:
        with path.open() as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(KEY_DIGITS + 2).strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise IdentityError(f"{path} cannot be read: {error}") from error
    if mode & 0o077:
        raise IdentityError(
            f"{path} can be read by others (mode {stat.S_IMODE(mode):o}): if that is harmless, "
            f"chmod 600 it; if not, remove it, and {HOW}"
        )
    if not is_key(text):
        raise IdentityError(f"{path} holds no key; remove it, and {HOW}")
    secret = bytes.fromhex(text)
    public = zmq.curve_public(z85.encode(secret))
    return KeyPair(z85.decode(public).hex(), secret)


def make_pair(state_dir: Path) -> KeyPair:
    """Makes this machine's key pair and writes it to a file in the state directory.

    Raises:
        IdentityError: the machine has a key pair already, or the file cannot be written.
    """
    path = secret_file(state_dir)
    pair = new_pair()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{pair.secret.hex()}\n")
    except FileExistsError as error:
        raise IdentityError(f"there is a key already: {path}") from error
    except OSError as error:
        raise IdentityError(f"{path} cannot be written: {error.strerror or error}") from error
    return pair


def parse_trusted(text: str) -> dict[str, str]:
    """Parses a list of trusted keys into names by public key. Each line is a key and a name, or
    empty, or begins with ``#``.

    Raises:
        IdentityError: a line is malformed; the message gives its number and the reason.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key, _, name = line.strip().partition(" ")
        name = name.strip()
        if not is_key(key):
            raise IdentityError(
                f"line {number}: expected a key of {KEY_DIGITS} hex digits and a name"
            )
        if not _NAME.fullmatch(name):
            raise IdentityError(
                f"line {number}: {name!r} is not a valid name: use letters, digits and _ . @ -"
            )
        if key in found or name in found.values():
            raise IdentityError(f"line {number}: {name} or its key is listed twice")
        found[key] = name
    return found


def read_trusted(path: Path) -> dict[str, str]:
    """Reads the trusted-keys file into names by public key; empty if there is no file.

    Raises:
        IdentityError: the file cannot be read or is malformed, or is empty, which happens for a
            moment while an editor writes it.
    """
    try:
        text = path.read_text()
        if not text:
            raise IdentityError(
                "line 1: the file is empty; a file without trusted keys needs a comment, at least"
            )
        return parse_trusted(text)
    except FileNotFoundError:
        return {}
    except IdentityError as error:
        raise IdentityError(f"{path}, {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise IdentityError(f"{path} cannot be read: {error}") from error


def add_trusted(trusted: Mapping[str, str], name: str, key: str) -> dict[str, str]:
    """Returns the trusted keys (names by public key) with one more; a key that is already trusted
    gets the new name.

    Raises:
        IdentityError: the name or the key is malformed, or the name belongs to another key.
    """
    if not is_key(key):
        raise IdentityError(
            f"not a public key: a public key is {KEY_DIGITS} hex digits, as `mayfly keys show` "
            f"prints it on the machine of {name}"
        )
    if not _NAME.fullmatch(name):
        raise IdentityError(f"{name!r} is not a valid name: use letters, digits and _ . @ -")
    others = {known: called for known, called in trusted.items() if known != key}
    if name in others.values():
        raise IdentityError(
            f"{name} is trusted with another key already: take another name, or first "
            f"`mayfly keys revoke {name}`"
        )
    return others | {key: name}


def write_trusted(path: Path, trusted: Mapping[str, str]) -> None:
    """Replaces the trusted-keys file as a whole or not at all. Raises IdentityError if a name or
    key is malformed or the file cannot be written."""
    text = _HEAD + "".join(f"{key} {name}\n" for key, name in trusted.items())
    parse_trusted(text)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        fresh.replace(path)
    except OSError as error:
        raise IdentityError(f"{path} cannot be written: {error.strerror or error}") from error


class TrustList:
    """The public keys of the peers that may connect, kept in memory.

    They come from the file ``trusted``, which is read again when it has changed. If the changed
    file cannot be used, the keys read last stay trusted (none, if the first read fails), and
    ``problem`` says why. If the file is removed, no key is trusted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._watch = FileWatch(path)
        self._names: dict[str, str] = {}
        self.problem = ""
        self._read()

    def __contains__(self, key: object) -> bool:
        return key in self._names

    def __len__(self) -> int:
        return len(self._names)

    def name(self, key: str) -> str:
        """Returns the name of a trusted key; for a key that is not trusted, its first
        characters."""
        return self._names.get(key) or f"{key[:8]}..."

    def reload(self) -> frozenset[str]:
        """Reads the trusted-keys file again if it has changed. Returns the keys that were trusted
        before the call and no longer are."""
        if not self._watch.changed():
            return frozenset()
        before = self._names
        self._read()
        return frozenset(before.keys() - self._names.keys())

    def _read(self) -> None:
        try:
            self._names = read_trusted(self._path)
            self.problem = ""
        except IdentityError as error:
            self.problem = str(error)
