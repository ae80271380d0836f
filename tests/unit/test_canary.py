"""The canary: a fixed prompt whose answer must not change between loads of a model."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import mlx.core as mx
import pytest
from structlog.testing import capture_logs

from mayfly_protocol.settings import WorkerSettings
from mayfly_worker.engine.decode import NonFiniteLogits
from mayfly_worker.model.canary import Canary, CanaryMismatch
from mayfly_worker.model.loading import LoadedModel, load


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> LoadedModel:
    settings = WorkerSettings("s", 1, "", "", str(tiny_model), "tiny")
    return load(settings, lambda *_: None)


def test_it_stores_its_song_and_knows_it_again(loaded: LoadedModel, tmp_path: Path) -> None:
    Canary.of(loaded, str(tmp_path / "canary")).check()
    [path] = (tmp_path / "canary").iterdir()
    assert [len(row) for row in json.loads(path.read_text())["tokens"]] == [8, 4, 6]
    Canary.of(loaded, str(tmp_path / "canary")).check()


def test_another_song_is_a_mismatch(loaded: LoadedModel, tmp_path: Path) -> None:
    Canary.of(loaded, str(tmp_path)).check()
    [path] = tmp_path.iterdir()
    stored = json.loads(path.read_text())
    stored["tokens"][0][5] += 1
    path.write_text(json.dumps(stored))
    with pytest.raises(CanaryMismatch, match="canary mismatch"):
        Canary.of(loaded, str(tmp_path)).check()


def test_a_song_of_another_version_is_no_reference(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or an upgraded worker would never be ready."""
    Canary.of(loaded, str(tmp_path)).check()
    monkeypatch.setattr("mayfly_worker.model.canary.TEXT", "The river goes on.")
    Canary.of(loaded, str(tmp_path)).check()
    monkeypatch.setattr("mayfly_worker.model.reference_store.versions", lambda: {"mlx": "99"})
    Canary.of(loaded, str(tmp_path)).check()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_full_disk_is_left_nothing_more(loaded: LoadedModel, tmp_path: Path) -> None:
    """No worker that tried leaves an empty file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with capture_logs() as logs:
            Canary.of(loaded, str(tmp_path)).check()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [each["event"] for each in logs] == [
        "reference result cannot be stored: later workers compute it anew"
    ]
    assert not list(tmp_path.iterdir())


def test_a_reference_cut_short_is_written_anew(loaded: LoadedModel, tmp_path: Path) -> None:
    Canary.of(loaded, str(tmp_path)).check()
    [path] = tmp_path.iterdir()
    path.write_text('{"tokens": [[1, 2')
    Canary.of(loaded, str(tmp_path)).check()
    assert json.loads(path.read_text())["tokens"]


def test_where_nothing_can_be_written_it_sings_all_the_same(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    canary = Canary.of(loaded, str(tmp_path / "file" / "canary"))
    with capture_logs() as logged:
        canary.check()
        canary.check()
    [complaint] = logged
    assert complaint["event"] == "reference result cannot be stored: later workers compute it anew"


def test_without_a_folder_the_first_song_is_the_reference(loaded: LoadedModel) -> None:
    canary = Canary.of(loaded, "")
    canary.check()
    weight = loaded.model.lm_head.weight
    # A device that starts to compute something else.
    loaded.model.lm_head.weight = weight[::-1]
    try:
        with pytest.raises(CanaryMismatch):
            canary.check()
        # Or nothing at all.
        loaded.model.lm_head.weight = mx.zeros_like(weight)
        with pytest.raises(NonFiniteLogits):
            canary.check()
    finally:
        loaded.model.lm_head.weight = weight
