"""Downloads of repositories, from a fake Hugging Face Hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.doubles.fake_hub import COMMIT, FakeHub, serve

pytestmark = pytest.mark.process

Fetch = Callable[..., "tuple[int, list[dict[str, Any]]]"]


@pytest.fixture
def hub(tiny_model: Path) -> Iterator[FakeHub]:
    files = {path.name: path.read_bytes() for path in tiny_model.iterdir()}
    repositories = {
        "some/model": files | {"README.md": b"# hello", "pytorch_model.bin": b"no use"},
        "some/gguf": {"config.json": b"{}", "model.gguf": b"GGUF"},
    }
    with serve(FakeHub(repositories)) as hub:
        yield hub


@pytest.fixture
def fetch(hub: FakeHub, tmp_path: Path) -> Fetch:
    """Runs a fetch with a cache of its own; returns exit code and events."""

    def run(model: str, **environment: str) -> tuple[int, list[dict[str, Any]]]:
        ended = subprocess.run(
            [sys.executable, "-m", "mayfly_worker.fetch", model, "--cache", str(tmp_path)],
            env={
                **os.environ,
                "HF_ENDPOINT": hub.url,
                "HF_HOME": str(tmp_path / "hf"),
                "HF_HUB_DISABLE_XET": "1",
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=60,
        )
        return ended.returncode, [json.loads(line) for line in ended.stdout.splitlines()]

    return run


def test_a_repository_is_downloaded_once(
    hub: FakeHub, fetch: Fetch, tiny_model: Path, tmp_path: Path
) -> None:
    code, events = fetch("some/model")
    assert code == 0
    done = events.pop()
    path = Path(done["path"])
    assert done == {"event": "done", "path": str(path), "name": "some/model"}
    assert path.is_relative_to(tmp_path / "hf")
    assert {p.name: p.read_bytes() for p in path.iterdir()} == {
        p.name: p.read_bytes() for p in tiny_model.iterdir()
    }
    total = sum(p.stat().st_size for p in tiny_model.iterdir())
    assert events[-1] == {"event": "progress", "what": "download", "done": total, "total": total}

    hub.served.clear()
    assert fetch("some/model") == (0, [done])
    assert fetch("some/model", HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9") == (0, [done])
    assert hub.served == []


def test_a_download_goes_on_with_what_is_missing(hub: FakeHub, fetch: Fetch) -> None:
    hub.broken.add("model.safetensors")
    code, events = fetch("some/model")
    assert code == 3
    assert "it could not be downloaded from the Hub" in events[-1]["message"]
    whole = set(hub.served) - {"model.safetensors"}

    hub.broken.clear()
    hub.served.clear()
    code, events = fetch("some/model")
    assert code == 0
    assert whole
    assert not whole & set(hub.served)
    assert "model.safetensors" in hub.served


def test_half_a_snapshot_is_not_taken_for_a_whole_one(hub: FakeHub, fetch: Fetch) -> None:
    _, events = fetch("some/model")
    weights = Path(events[-1]["path"]) / "model.safetensors"
    weights.resolve().unlink()
    weights.unlink()
    code, events = fetch("some/model", HF_HUB_OFFLINE="1")
    assert code == 3
    assert "HF_HUB_OFFLINE forbids" in events[-1]["message"]
    code, events = fetch("some/model")
    assert code == 0
    assert weights.exists()
    assert COMMIT in events[-1]["path"]


@pytest.mark.parametrize(
    ("model", "environment", "complaint"),
    [
        ("some/nothing", {}, "on the Hub no such repository"),
        ("some/gguf", {}, "has no weights that MLX can load"),
        ("some model", {}, "neither a folder here nor the id"),
        ("some/model", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE forbids"),
        ("some/model", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "could not be downloaded"),
    ],
)
def test_failures_say_what_is_wrong(
    fetch: Fetch, model: str, environment: dict[str, str], complaint: str
) -> None:
    code, events = fetch(model, **environment)
    assert code == 3
    assert events[-1]["event"] == "error"
    assert complaint in events[-1]["message"]


def test_a_gated_repository_says_how_to_get_in(hub: FakeHub, fetch: Fetch) -> None:
    hub.gated.add("some/model")
    code, events = fetch("some/model")
    assert code == 3
    assert "is gated: ask for access" in events[-1]["message"]
    assert hub.served == []
