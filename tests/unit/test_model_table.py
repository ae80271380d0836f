"""Every model module of mlx-lm gives mlx-lm's tokens in Mayfly's engine, or is refused."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from support.model_table import judge
from support.models.configurations import TABLE, configuration, modules

ROOT = Path(__file__).parents[2]
SAMPLE = {
    "gptj": "KVCache",
    "cohere2": "KVCache, RotatingKVCache",
    "mamba2": "ArraysCache",
    "recurrent_gemma": "ArraysCache, RotatingKVCache",
    "baichuan_m1": "CacheList of ArraysCache, KVCache, RotatingKVCache",
    "llama4": "ChunkedKVCache, KVCache",
}
"""Modules that CI judges: each kind of cache is in one of them."""
REST = [name for name in modules() if name not in SAMPLE]


@pytest.mark.heavy
@pytest.mark.parametrize("module", SAMPLE)
def test_a_model_of_each_kind_of_cache_is_right(module: str, tmp_path: Path) -> None:
    verdict = judge(module, tmp_path)
    assert verdict.right, verdict
    assert verdict.caches == SAMPLE[module]
    assert verdict.outcome == ("one row" if module == "llama4" else "same")


@pytest.mark.heavy
@pytest.mark.long
@pytest.mark.parametrize("module", REST)
def test_every_other_module_is_right_or_refused(module: str, tmp_path: Path) -> None:
    verdict = judge(module, tmp_path)
    assert verdict.right, verdict


def test_every_module_has_a_configuration() -> None:
    """A module of a newer mlx-lm is not judged before it has one."""
    for module in modules():
        try:
            assert configuration(module)["model_type"]
        except SystemExit:
            assert module == "olmo", "it needs a package that is not installed"


def test_a_module_without_a_configuration_is_told_of_with_the_remedy() -> None:
    with pytest.raises(LookupError, match=rf"add a table \[modules\.llama9\] to {TABLE.name}"):
        configuration("llama9")


def test_the_manual_has_the_table_of_the_pinned_mlx_lm() -> None:
    page = (ROOT / "docs" / "models.md").read_text("utf-8")
    [pinned] = [
        line.removeprefix("mlx-lm==")
        for line in (ROOT / "requirements.lock").read_text("utf-8").splitlines()
        if line.startswith("mlx-lm==")
    ]
    if version("mlx-lm") == pinned:
        assert f"mlx-lm {pinned}: {len(modules())} modules" in page
        assert [name for name in modules() if f"| `{name}` |" not in page] == []
