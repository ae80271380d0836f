"""Statements of CONTRIBUTING.md and its neighbours that can be checked against the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "protocol": ROOT / "protocol" / "mayfly_protocol",
    "reaper": ROOT / "worker" / "mayfly_reaper",
    "server": ROOT / "server" / "mayfly_server",
    "cli": ROOT / "server" / "mayfly_cli",
    "worker": ROOT / "worker" / "mayfly_worker",
}


def cells(page: str, title: str) -> Iterator[list[str]]:
    """The rows of the first table of a page's section."""
    text = (ROOT / page).read_text(encoding="utf-8")
    section = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("|")]
    yield from rows[2:]


def place(name: str, beside: Path) -> Path | None:
    """Finds the file or folder that a name in the table of modules stands for: from a package or
    the root on, or from a folder on that holds the entry before it."""
    package, _, rest = name.partition("/")
    if package in PACKAGES and rest:
        bases = [PACKAGES[package] / rest]
    else:
        bases = [beside / name, *(folder / name for folder in beside.parents)]
    found = (path for base in bases for path in (base, base.with_name(f"{base.name}.py")))
    return next((path for path in found if path.exists()), None)


def test_every_row_names_a_module() -> None:
    for _, modules in cells("ARCHITECTURE.md", "Where to find what"):
        beside = ROOT
        for name in re.findall(r"`([^`]+)`", modules):
            found = place(name, beside)
            assert found is not None, (name, modules)
            beside = found


def test_every_command_of_make_is_told_of() -> None:
    targets = re.findall(r"^([a-z-]+):.* ## ", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    told = [command for row in cells("CONTRIBUTING.md", "Set up") for command in row[:1]]
    named = re.findall(r"`make ([a-z-]+)`", " ".join(told))
    assert sorted({*named, "help"}) == sorted(targets)


def test_every_folder_of_tests_is_told_of() -> None:
    told = {row[0].strip(" `") for row in cells("CONTRIBUTING.md", "Tests")}
    there = {path.parent for path in (ROOT / "tests").rglob("*.py")} - {ROOT / "tests"}
    assert told == {str(path.relative_to(ROOT)) for path in there}


def test_the_example_of_selecting_tests_selects_some() -> None:
    [word] = re.findall(r"`ARGS=\"-k (\w+)\"`", (ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    files = list((ROOT / "tests").rglob("test_*.py"))
    functions = [
        name for file in files for name in re.findall(r"def (test_\w+)", file.read_text("utf-8"))
    ]
    assert any(word in name for name in (*functions, *(file.stem for file in files)))
