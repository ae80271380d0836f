"""Declaration of options on the fields of settings dataclasses.

A field that is annotated with an :class:`Option` is an option of the command line, an environment
variable and a key of ``mayfly.toml``. The command line reads the declarations whenever ``mayfly``
starts, so modules with settings dataclasses import nothing that takes long to import.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Option:
    """Declaration of a settings field as an option, as in ``Annotated[int, Option("Rows of a
    batch.", at_least=1)]``.

    The option's name, default and type are those of the field, unless the declaration gives others.
    """

    help: str
    name: str = ""
    """The option's key in ``mayfly.toml``; if empty, the field's name without its unit ``_s``."""
    flag: str = ""
    """The option's flag on the command line; if empty, the option's name with dashes."""
    aliases: tuple[str, ...] = ()
    """Further command-line flags with the same meaning as ``flag``."""
    at_least: float | None = None
    at_most: float | None = None
    one_of: tuple[Any, ...] = ()
    """The allowed values; if empty, the values of the field's ``Literal`` type, or any value."""
    pattern: str = ""
    """Regular expression that each item of a list-valued option matches as a whole."""
    example: str = ""
    """An example of a list item that matches ``pattern``."""
    exists: Literal["", "file", "folder"] = ""
    """``file`` or ``folder`` if the option's path has to lead to one."""
    guarded: bool = False
    """True if the option runs code, opens the server to others or shows them prompts: a
    ``mayfly.toml`` that is only found in the working directory may not set it."""
    type: type[Any] | None = None
    """Type of the option's value, where it differs from the type of the settings field."""
    convert: Callable[[Any], Any] | None = None
    """Makes the settings field's value of the option's value, unless the option's value is None."""


def size(help: str) -> Option:
    """Declares a settings field in bytes, whose option takes gigabytes (10^9 bytes)."""
    return Option(help, at_least=0, type=float, convert=lambda gigabytes: int(gigabytes * 1e9))


def seconds(help: str, name: str = "", at_least: float = 0) -> Option:
    """Declares a settings field whose option takes a time in seconds, ``at_least`` or more."""
    return Option(help, name=name, at_least=at_least)


def absolute(path: Path) -> Path:
    """Expands ``~`` in a path and makes the path absolute, for use by a process in another
    folder."""
    return path.expanduser().resolve()


def absolute_text(path: Path) -> str:
    """Makes a path absolute and returns it as text, for a settings field of type ``str``."""
    return str(absolute(path))
