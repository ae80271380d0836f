"""The mkdocs hook that adds pages to those in ``docs/`` and adapts links.

- Some pages are generated from the code (:mod:`reference`).
- Some files of the repository are pages, too.
- A link out of ``docs/`` leads to such a page, or is replaced by the file's name; a link to a
  file that does not exist is an error.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
MADE: Mapping[str, Callable[[], str]] = {
    "configuration.md": reference.configuration,
    "commands.md": reference.commands,
    "faults.md": reference.faults,
}
TAKEN: Mapping[str, str] = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "bench/RESULTS.md": "results.md",
    "deploy/README.md": "deploy.md",
    "grafana/README.md": "grafana.md",
}
"""Files of the repository, and their names in the manual."""
ELSEWHERE: Mapping[str, str] = {
    "README.md": "index.md",
}
"""Files without a page of their own, and the page that links to them lead to."""

_CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages, and those from files of the repository."""
    for name, make in MADE.items():
        files.append(File.generated(config, name, content=make()))
    for source, name in TAKEN.items():
        content = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites the links of a page."""
    name = page.file.src_uri
    origins = {taken: source for source, taken in TAKEN.items()}
    folder = posixpath.dirname(origins.get(name, f"docs/{name}"))

    def rewrite(link: re.Match[str]) -> str:
        return _rewrite(link[1], link[2], name, folder)

    # Odd parts are code, in which nothing is a link.
    parts = _CODE.split(_without_broken_links(markdown))
    return "".join(part if n % 2 else _LINK.sub(rewrite, part) for n, part in enumerate(parts))


def _without_broken_links(markdown: str) -> str:
    """Removes the code marks within links' texts, at which the page would be split."""
    return re.sub(r"\[`([^`\]]+)`\]\(", r"[\1](", markdown)


def _rewrite(text: str, target: str, page: str, folder: str) -> str:
    """Rewrites a link, from a page that lies in ``folder`` of the repository, for the manual."""
    path, hash_, anchor = target.partition("#")
    source = posixpath.normpath(posixpath.join(folder, path))
    here = posixpath.dirname(page)
    found = ELSEWHERE.get(f"{source}{hash_}{anchor}") or ELSEWHERE.get(source)
    if found is not None:
        return f"[{text}]({posixpath.relpath(found, here or '.')})"
    inside = TAKEN.get(source) or (source[len("docs/") :] if source.startswith("docs/") else None)
    if inside is not None:
        return f"[{text}]({posixpath.relpath(inside, here or '.')}{hash_}{anchor})"
    if not (ROOT / source).exists():
        raise PluginError(f"{page} links to {target}, and there is no {source}")
    return text if "`" in text else f"`{text}`"
