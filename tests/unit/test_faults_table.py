"""Every fault kind that a text can show, by texts in the wording of MLX and the systems below
it."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from mayfly_protocol.faults import KINDS, TABLE, Kind, classify_text
from mayfly_protocol.faults.examples import EXAMPLES as TEXTS
from mayfly_protocol.lifecycle import Scope

ORDER = [
    "metal_submissions_ignored",
    "metal_timeout",
    "metal_hang",
    "metal_out_of_memory",
    "metal_interactivity",
    "metal_memory_fault",
    "metal_innocent_victim",
    "metal_other",
    "metal_assert",
    "metal_resource_limit",
    "metal_buffer_size",
    "allocation_failed",
    "metal_objects",
    "metal_init",
    "metal_compile",
    "wired_limit",
    "stream_thread",
    "cuda_sticky",
    "cuda_out_of_memory",
    "cuda_graph_thrash",
    "cuda_graph_poison",
    "cuda_capture",
    "cuda_graph_launch",
    "cuda_library",
    "cuda_compile",
    "cuda_environment",
    "cuda_event",
    "cuda_other",
    "cxx_abort",
    "unsupported",
    "shape",
    "model_load",
    "nonfinite_logits",
    "canary_mismatch",
    "killed_by_system",
    "killed",
    "crashed",
    "aborted",
    "wedged",
    "silent",
    "unknown",
]

SILENT = {"killed", "silent", "unknown"}
"""Kinds that no text tells."""


def test_the_table_has_all_kinds_in_their_order() -> None:
    assert [kind.name for kind in TABLE] == ORDER


def test_names_are_unique() -> None:
    assert len(KINDS) == len(TABLE) + 6


def test_every_kind_is_told_by_two_texts_at_least_or_by_none() -> None:
    told = {kind.name for kind in TABLE if kind.signature is not None}
    assert told == set(ORDER) - SILENT == set(TEXTS)
    assert all(len(set(texts)) >= 2 for texts in TEXTS.values())


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in TEXTS.items() for text in texts]
)
def test_a_text_is_of_its_kind(name: str, text: str) -> None:
    verdict = classify_text(text)
    assert (verdict.kind, verdict.scope, verdict.blame) == (
        name,
        KINDS[name].scope,
        KINDS[name].blame,
    )
    assert verdict.signature
    assert verdict.signature in text


@pytest.mark.parametrize("text", [text for texts in TEXTS.values() for text in texts])
def test_the_final_dot_does_not_matter(text: str) -> None:
    assert classify_text(text.removesuffix(".")).kind == classify_text(text).kind


@pytest.mark.parametrize(
    "text",
    [
        "",
        "KeyError: 'model'",
        "division by zero",
        "the METAL command buffer failed",
        "pip install 'mlx-lm[full]' failed",
        "1 request(s) failed: out of memory budget",
        "ConnectionError: Timeout (5 s) while reading",
        "[take_along_axis] Indices of dimension 2 does not match array of dimension 3.",
    ],
)
def test_what_no_row_names_is_unknown_and_costs_the_worker(text: str) -> None:
    verdict = classify_text(text)
    assert (verdict.kind, verdict.scope, verdict.signature) == ("unknown", "worker", "")


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_kind_is_written_for_people(kind: Kind) -> None:
    assert kind.scope in get_args(Scope)
    for text in (kind.meaning, kind.reaction, kind.advice):
        assert re.fullmatch(r"([A-Z]|macOS).*[.]", text), f"{kind.name}: no sentence: {text!r}"


def test_few_kinds_are_never_the_first_of_their_process() -> None:
    assert {kind.name for kind in TABLE if kind.follows} == {
        "metal_submissions_ignored",
        "cuda_graph_poison",
        "cuda_capture",
    }


@pytest.mark.parametrize(
    "name", ["metal_innocent_victim", "killed", "stream_thread", "cuda_environment"]
)
def test_no_request_is_blamed_for_what_is_not_its_doing(name: str) -> None:
    assert KINDS[name].blame == "none"


@pytest.mark.parametrize(
    "name", ["metal_memory_fault", "cuda_graph_launch", "crashed", "killed_by_system"]
)
def test_requests_are_suspected_where_their_shapes_may_have_done_it(name: str) -> None:
    assert KINDS[name].blame == "suspects"
