"""Declaration of options on the fields of settings dataclasses.

A field that is annotated with an :class:`Option` is an option of the command line, an environment
variable and a key of ``mayfly.toml``. The command line reads the declarations whenever ``mayfly``
starts, so modules with settings dataclasses import nothing that takes long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Option:
    """Metadata of a field, as ``Annotated[int, Option("Rows of a batch.", at_least=1)]``.

    The option's name, default and type are those of the field, unless given here.
    """

    help: str
    name: str = ""
    """Name of the key; empty: the field's name without the unit ``_s``."""
    flag: str = ""
    """Flag on the command line; empty: the name with dashes."""
    aliases: tuple[str, ...] = ()
    """Further flags with the same meaning."""
    at_least: float | None = None
    at_most: float | None = None
    one_of: tuple[Any, ...] = ()
    """The values that are allowed; empty: those of the field's ``Literal``, or any."""
    pattern: str = ""
    """Regular expression that each item of a list matches as a whole."""
    example: str = ""
    """An item that matches the pattern."""
    exists: Literal["", "file", "folder"] = ""
    """Kind of file that a path has to lead to."""
    type: type[Any] | None = None
    """Type of the option's value, where it differs from the field's."""
    convert: Callable[[Any], Any] | None = None
    """Makes the field's value of the option's, unless that is None."""


def size(help: str) -> Option:
    """Declares a field in bytes, which the option takes in gigabytes (10^9 bytes)."""
    return Option(help, at_least=0, type=float, convert=lambda gigabytes: int(gigabytes * 1e9))


def seconds(help: str, name: str = "", at_least: float = 0) -> Option:
    """Declares a time."""
    return Option(help, name=name, at_least=at_least)


def absolute(path: Path) -> Path:
    """Expands ``~`` in a path and makes it absolute, for a process that runs elsewhere."""
    return path.expanduser().resolve()


def absolute_text(path: Path) -> str:
    """Makes a path absolute, for a field that is a text."""
    return str(absolute(path))
