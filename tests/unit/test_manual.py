"""The manual builds without a warning, has no dead links, and agrees with the code where that can
be checked."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import typer.main
from pydantic import ValidationError

from mayfly_cli.app import app
from mayfly_cli.config.keys import SERVER, TABLE
from mayfly_protocol.faults import KINDS
from mayfly_protocol.faults.examples import EXAMPLES
from mayfly_server.api.openai.chat_request import ChatRequest
from mayfly_server.api.openai.completions import CompletionRequest
from mayfly_server.app import create_app
from mayfly_server.settings import FrontSettings

ROOT = Path(__file__).parents[2]
MADE = {"configuration.md", "commands.md", "faults.md"}
"""Pages that are made from the code when the manual is built."""


@dataclass
class Html(HTMLParser):
    """Links, resources and anchors of a page."""

    path: Path
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    words: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids |= {value for name in ("id", "name") if (value := found.get(name))}
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        elif tag == "link" and found.get("rel") != "canonical" and found.get("href"):
            self.loads.append(str(found["href"]))
        elif found.get("src"):
            self.loads.append(str(found["src"]))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Html]:
    """Every page by its path."""
    folder = tmp_path_factory.mktemp("manual")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    pages = {str(path.relative_to(folder)): Html(path) for path in folder.rglob("*.html")}
    return {name: page for name, page in pages.items() if name != "404.html"}


@pytest.mark.process
def test_no_link_leads_nowhere(site: dict[str, Html]) -> None:
    assert len(site) > 15
    for name, page in site.items():
        for link in (*page.links, *page.loads):
            parts = urlsplit(link)
            if parts.scheme:
                assert parts.scheme in ("https", "http", "mailto"), (name, link)
                continue
            target = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
            assert target.is_file(), (name, link)
            if parts.fragment and target.suffix == ".html":
                assert unquote(parts.fragment) in Html(target).ids, (name, link)


@pytest.mark.process
def test_nothing_is_loaded_from_elsewhere(site: dict[str, Html]) -> None:
    for name, page in site.items():
        assert [load for load in page.loads if urlsplit(load).netloc] == [], name


@pytest.mark.process
def test_every_key_command_and_fault_has_its_place(site: dict[str, Html]) -> None:
    configuration = site["configuration.html"].text
    assert [key for key in (*SERVER, *TABLE) if key not in configuration] == []
    commands = site["commands.html"].ids
    names = list(commands_of("mayfly", typer.main.get_command(app)))
    assert "mayfly faults show" in names
    assert [name for name in names if name.replace(" ", "-") not in commands] == []
    faults = site["faults.html"]
    assert set(KINDS) <= faults.ids
    for texts in EXAMPLES.values():
        for text in texts:
            assert text in faults.text


def commands_of(path: str, command: Any) -> Any:
    inner = getattr(command, "commands", {})
    if not inner:
        yield path
    for name, each in inner.items():
        yield from commands_of(f"{path} {name}", each)


MARKDOWN = sorted(
    path
    for folder in (ROOT, ROOT / "docs", ROOT / "deploy", ROOT / "bench", ROOT / "grafana")
    for path in (folder.rglob("*.md") if folder != ROOT else folder.glob("*.md"))
)


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_files_of_the_repository_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        place = target.partition("#")[0]
        if "://" in place or not place or Path(place).name in MADE:
            continue
        assert (path.parent / place).exists(), target


MIGRATION = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")


def rows_of(title: str) -> list[list[str]]:
    """The rows of a table of the page about coming from mlx_lm.server: theirs, ours, a remark."""
    section = MIGRATION.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return [row.split("|")[1:-1] for row in section.splitlines() if row.startswith(("| `", "| |"))]


def source_of_mlx_lm() -> str:
    spec = importlib.util.find_spec("mlx_lm")
    assert spec is not None
    assert spec.submodule_search_locations
    return (Path(spec.submodule_search_locations[0]) / "server.py").read_text(encoding="utf-8")


@pytest.mark.process
def test_the_way_from_mlx_lm_names_every_option_of_both() -> None:
    rows = rows_of("Options")
    theirs = {option for row in rows for option in re.findall(r"--[a-z-]+", row[0])}
    ours = {option for row in rows for option in re.findall(r"--[a-z-]+", row[1])}
    assert theirs == options_of_mlx_lm()
    assert ours <= {key.flag for key in SERVER.values()}


def test_the_way_from_mlx_lm_names_every_field_and_what_becomes_of_it() -> None:
    taken = set(ChatRequest.model_fields) | set(CompletionRequest.model_fields)
    named = set()
    for theirs, ours, remark in rows_of("Fields of a request"):
        fields = set(re.findall(r"`(\w+)`", theirs))
        named |= fields
        if ours.strip():
            assert fields <= taken
        elif remark.strip().startswith("ignored"):
            assert fields.isdisjoint(taken)
        else:
            assert remark.strip().startswith("400"), fields
            for name in fields:
                with pytest.raises(ValidationError, match=f"(?s){name}.*Use "):
                    ChatRequest.model_validate(
                        {"messages": [{"role": "user", "content": "a"}], name: "x"}
                    )
    asked_for = re.findall(r"body\.get\(\s*\"(\w+)\"", source_of_mlx_lm())
    assert {*asked_for} - {"messages", "prompt"} <= named


def test_the_way_from_mlx_lm_names_every_address() -> None:
    source = source_of_mlx_lm()
    theirs = set(re.findall(r"\"(/(?:v1/)?[a-z/]+)\"(?::| ?\)|:)", source))
    assert {"/v1/chat/completions", "/v1/models", "/health"} <= theirs
    rows = rows_of("Addresses")
    assert theirs <= {path for row in rows for path in re.findall(r"(/[a-z0-9/]+)`", row[0])}
    document = create_app(FrontSettings(())).openapi()["paths"].keys()
    ours = {path for row in rows for path in re.findall(r"`(?:[A-Z]+ )?(/[a-z0-9/._]*)`", row[1])}
    untold = {"/", "/mayfly/events", "/metrics", "/openapi.json"}
    assert ours - untold <= document


def options_of_mlx_lm() -> set[str]:
    """Returns the options that mlx_lm.server's own help lists."""
    command = [sys.executable, "-m", "mlx_lm.server", "--help"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", listed, re.MULTILINE)) - {"--help"}
