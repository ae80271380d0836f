"""Resolution of model names, completeness of model folders, and progress events of a fetch."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from mayfly_cli.config.models import aliases_by_path
from mayfly_worker.fetch import model_folder
from mayfly_worker.fetch.reporting import INTERVAL_S, EventWriter, FetchError
from mayfly_worker.fetch.resolve import resolve
from mayfly_worker.model.weight_files import INDEX
from support.fake_clock import FakeClock
from support.models import tiny


def ignore(what: str, done: int, total: int) -> None:
    pass


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.build(tmp_path / "some-model")


# EventWriter


def test_progress_is_thinned_but_for_its_ends() -> None:
    clock, out = FakeClock(), io.StringIO()
    events = EventWriter(out, clock)
    for step in range(100):
        clock.now = step * INTERVAL_S / 10
        events.progress("download", step, 99)
    events.progress("download", 99, 99)
    events.progress("convert", 1, 9)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    told = [(line["what"], line["done"]) for line in lines]
    assert told[0] == ("download", 0)
    assert told[-2:] == [("download", 99), ("convert", 1)]
    assert 10 <= len(told) <= 13


def test_events_are_lines_of_json() -> None:
    out = io.StringIO()
    events = EventWriter(out)
    events.error("two\nlines")
    events.done(Path("/a/b"), "é")
    first, second = out.getvalue().splitlines()
    assert json.loads(first) == {"event": "error", "message": "two\nlines"}
    assert json.loads(second) == {"event": "done", "path": "/a/b", "name": "é"}


# Names


def test_a_folder_is_taken_as_it_is(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fetched = resolve("some-model", tmp_path / "cache", float32=False, report=ignore)
    assert (fetched.path, fetched.name) == (model, "some-model")
    monkeypatch.chdir(model)
    assert resolve(".", tmp_path / "cache", float32=False, report=ignore) == fetched
    assert not (tmp_path / "cache").exists()


def test_N17_a_snapshot_has_the_name_of_its_repository_and_a_link_its_own(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name(path: str | Path) -> str:
        found = resolve(str(path), tmp_path / "cache", float32=False, report=ignore)
        assert found.path.is_dir()
        assert not found.path.is_symlink()
        return found.name

    commit = "0123456789" * 4
    names = {"models--acme--tiny": "acme/tiny", "models--gpt2": "gpt2", "tiny": "tiny"}
    for folder, right in names.items():
        snapshot = tmp_path / folder / "snapshots" / commit
        snapshot.parent.mkdir(parents=True)
        snapshot.symlink_to(model)
        assert name(snapshot) == name(f"{snapshot}/") == right
        assert aliases_by_path([{"name": "", "path": str(snapshot), "aliases": ["a"]}]) == {
            "a": right
        }
    link = tmp_path / "nice-name"
    link.symlink_to(tmp_path / "tiny" / "snapshots" / commit)
    monkeypatch.chdir(tmp_path)
    assert name(link) == name("nice-name") == "nice-name"


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "~/no-such-model", "a/b/c"])
def test_a_path_that_is_not_there_is_no_repository(name: str, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="There is no folder"):
        resolve(name, tmp_path, float32=False, report=ignore)


def test_an_address_is_no_name(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="what follows its host"):
        resolve("https://huggingface.co/a/b", tmp_path, float32=False, report=ignore)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(FetchError, match="is a file"):
        resolve(str(tmp_path / "model.gguf"), tmp_path, float32=False, report=ignore)


@pytest.mark.process
def test_a_model_that_is_there_needs_neither_mlx_nor_the_hub(model: Path, tmp_path: Path) -> None:
    """Nor anything else that takes long to import."""
    script = (
        "import sys; from mayfly_worker.fetch.__main__ import main; main();"
        "heavy = {'mlx.core', 'mlx_lm', 'huggingface_hub', 'tokenizers', 'transformers', 'numpy'};"
        "assert not heavy & sys.modules.keys()"
    )
    command = [sys.executable, "-c", script, str(model), "--cache", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.stderr == ""
    assert json.loads(ended.stdout)["event"] == "done"


@pytest.mark.process
def test_a_failure_is_an_event_and_an_exit_code(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mayfly_worker.fetch", str(tmp_path), "--cache", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 3
    event = json.loads(ended.stdout)
    assert event["event"] == "error"
    assert "no config.json" in event["message"]
    assert ended.stderr == ""


# Folders

Damage = Callable[[Path], object]


def shorten(path: Path, by: int) -> None:
    os.truncate(path, path.stat().st_size - by)


def lose_a_shard(model: Path) -> None:
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (model / "model.safetensors").rename(model / shards["a"])
    (model / INDEX).write_text(json.dumps({"weight_map": shards}))


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda m: (m / "config.json").unlink(), "is not a model's folder: it has no config.json"),
        (lambda m: (m / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda m: (m / "config.json").write_text("[]"), "does not hold a JSON object"),
        (lambda m: (m / "config.json").write_text("{}"), "names no model_type"),
        (lambda m: (m / "model.safetensors").unlink(), "has no weights"),
        (lambda m: shorten(m / "model.safetensors", 1), "was not downloaded to its end"),
        (lambda m: os.truncate(m / "model.safetensors", 100), "not a safetensors file, or only"),
        (lambda m: (m / "model.safetensors").write_bytes(b""), "not a safetensors file, or only"),
        (
            lambda m: (m / "model.safetensors").write_text("version https://git-lfs..."),
            "git lfs pull",
        ),
        (
            lambda m: (m / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"{{{{"),
            "cannot be read",
        ),
        (lose_a_shard, "the first is model-00002-of-00002.safetensors"),
        (lambda m: (m / "tokenizer.json").unlink(), "has no tokenizer"),
    ],
)
def test_what_a_folder_lacks_is_said(model: Path, damage: Damage, complaint: str) -> None:
    model_folder.check(model)
    damage(model)
    with pytest.raises(FetchError, match=complaint):
        model_folder.check(model)


# Room


def test_a_full_disk_is_noticed_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "mayfly_worker.fetch.model_folder.shutil.disk_usage",
        lambda _: SimpleNamespace(free=5_000_000),
    )
    model_folder.require_room(tmp_path / "not" / "yet", 5_000_000)
    with pytest.raises(FetchError, match=r"1\.2 GB are needed and 5 MB are free"):
        model_folder.require_room(tmp_path / "not" / "yet", 1_200_000_000)
