"""The ids in the names of tests and in the manual resolve to lines of docs/reported-faults.md, or
of docs/threat-model.md for attacks that were tried on Mayfly itself."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reported-faults.md"
LINE = re.compile(r"^\| ([A-Z]\d{2,3}) \| (.+) \| (.+) \|$", re.MULTILINE)
UNTESTED = "*No test: "
LINES = LINE.findall(PAGE.read_text(encoding="utf-8"))
KNOWN = {name for name, _, _ in LINES}
ATTACKS = set(
    re.findall(
        r"^\| ([BS]\d{2}) \|",
        (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
)


def ids_of_tests() -> set[str]:
    functions = [
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", file.read_text(encoding="utf-8"))
    ]
    return {each for name in functions for each in re.findall(r"_([A-Z]\d{2,3})(?=_|$)", name)}


def test_every_line_is_complete_and_every_id_has_one() -> None:
    rows = [row for row in PAGE.read_text("utf-8").splitlines() if re.match(r"\| [A-Z]\d", row)]
    assert len(rows) == len(LINES) == len(KNOWN) > 100
    for name, reported, seen in LINES:
        assert "](https://" in reported, name
        assert seen.rstrip("*").endswith("."), name


def test_every_id_in_the_name_of_a_test_has_a_line() -> None:
    assert ids_of_tests() - KNOWN - ATTACKS == set()


def test_every_line_has_a_test_or_says_why_not() -> None:
    untested = {name for name, _, seen in LINES if UNTESTED in seen}
    assert (KNOWN | ATTACKS) - ids_of_tests() == untested


def test_every_id_in_the_manual_has_a_line() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        if page != PAGE:
            named = re.findall(r"\b(R\d{2,3})\b", page.read_text(encoding="utf-8"))
            assert set(named) - KNOWN == set(), page.name
