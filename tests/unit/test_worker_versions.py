"""Versions of a worker's parts."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from mayfly_worker.model import reference_store


def test_every_part_is_named() -> None:
    assert reference_store.versions() == {
        name: version(name) for name in ("mlx-mayfly", "mlx", "mlx-lm")
    }


def test_what_is_not_installed_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_store, "DISTRIBUTIONS", ("mlx", "runs-from-its-source-tree"))
    assert reference_store.versions() == {"mlx": version("mlx")}
