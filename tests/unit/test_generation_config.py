"""The sampling parameters that a model's authors recommend hold where a request names none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mayfly_protocol.requests import Sampling
from mayfly_server.api import request_fields
from mayfly_server.api.request_fields import SamplingFields
from mayfly_worker.model.generation_config import FILE, RANGES, completed, recommended
from mayfly_worker.model.weight_files import ModelLoadError

AUTHORS = {"do_sample": True, "temperature": 0.6, "top_k": 1, "top_p": 0.95}


def read(folder: Path, config: Any) -> dict[str, float]:
    (folder / FILE).write_text(config if isinstance(config, str) else json.dumps(config))
    return recommended(folder)


def sampled(defaults: dict[str, float], **fields: Any) -> Sampling:
    """The sampling of a request with these fields, of a model with these defaults."""
    sent = request_fields.sampling(SamplingFields(seed=0, **fields))
    return replace(completed(sent, defaults), unnamed=())


def test_N13_what_a_request_does_not_name_is_as_the_authors_recommend(tmp_path: Path) -> None:
    assert recommended(tmp_path) == {}
    authors = read(tmp_path, AUTHORS | {"eos_token_id": 2, "max_length": 20, "min_p": None})
    assert authors == {"temperature": 0.6, "top_k": 1, "top_p": 0.95}
    right = Sampling(seed=0, temperature=0.6, top_k=1, top_p=0.95)
    assert sampled(authors) == sampled(authors, temperature=None, top_k=None) == right
    assert sampled({}) == Sampling(seed=0)
    named = sampled(authors, temperature=1.0, top_k=0)
    assert named == Sampling(seed=0, temperature=1.0, top_k=0, top_p=0.95)
    for greedy in ({"temperature": 0}, {"top_p": 0}):
        chosen = sampled(authors, **greedy)
        assert (chosen.temperature, chosen.top_p) == (0.0, 1.0)


def test_N13_a_model_that_is_not_to_be_sampled_is_greedy(tmp_path: Path) -> None:
    authors = read(tmp_path, AUTHORS | {"do_sample": False, "repetition_penalty": 1.1})
    assert sampled(authors) == Sampling(seed=0, temperature=0.0, repetition_penalty=1.1)
    assert sampled(authors, temperature=0.8).temperature == 0.8
    assert read(tmp_path, {"temperature": 1e-9}) == {"temperature": 0.0}
    assert read(tmp_path, {"top_p": 0.0}) == {"temperature": 0.0}
    assert read(tmp_path, {"top_k": -1}) == {"top_k": 0}


@pytest.mark.parametrize(
    "config",
    ["{", [], 1, {"temperature": -1}, {"top_k": "1"}, {"top_p": 1.5}, {"min_p": True}],
)
def test_N13_a_file_that_recommends_nonsense_is_refused(tmp_path: Path, config: Any) -> None:
    with pytest.raises(ModelLoadError, match=FILE):
        read(tmp_path, config)


def test_the_front_end_leaves_to_the_worker_what_the_file_may_recommend() -> None:
    assert set(request_fields.RECOMMENDED) == set(RANGES)
