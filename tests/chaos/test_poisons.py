"""Several different requests that break things, at once, among others: each ends alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from support.chaos_client import StreamingClient
from support.poisons import POISONS, TALE, Outcome, model, play, served
from support.server import wait_for

ROUND_S = 600.0


def check(outcome: Outcome, poisons: Sequence[str]) -> None:
    assert [text for text in outcome.texts if text != TALE] == []
    assert outcome.codes == [POISONS[name][1] for name in poisons]
    assert not any(outcome.retryable)
    assert outcome.quarantined == len(poisons)
    assert len(outcome.lost) <= 3 * len(poisons)


@pytest.mark.parametrize(
    ("poisons", "workers", "innocents"),
    [
        (("shape, prefill", "allocation, prefill"), 1, 4),
        *(
            pytest.param(tuple(POISONS)[first : first + count], workers, 16, marks=pytest.mark.long)
            for workers in (1, 2)
            for count in (1, 2, 3, 8)
            for first in range(0, len(POISONS) - count + 1, count)
        ),
    ],
)
def test_B01_each_of_several_poisons_ends_alone(
    tmp_path: Path, poisons: tuple[str, ...], workers: int, innocents: int
) -> None:
    with served(model(tmp_path / "model"), tmp_path, workers) as server:
        check(play(server, poisons, innocents, ROUND_S), poisons)
        [again] = [StreamingClient(server, f"[{poisons[0]}]", seed=8)]
        assert getattr(again.error, "code", None) == POISONS[poisons[0]][1]


@pytest.mark.long
def test_B02_after_two_deaths_other_requests_are_served(tmp_path: Path) -> None:
    """With default settings, on one worker, beside a stream that has begun."""
    poison = "unknown, prefill"
    with served(model(tmp_path / "model", step_s=0.05), tmp_path, 1) as server:
        stream = StreamingClient(server, "[tale] first")
        wait_for(lambda: stream.answer.at, "a token")
        bad = StreamingClient(server, f"[{poison}]")
        wait_for(lambda: len(server.autopsies()) >= 2, "two deaths")
        later = [StreamingClient(server, f"[tale] later {n}") for n in range(4)]
        assert [each.result().text for each in later] == [TALE] * 4
        assert stream.result().text == TALE
        assert getattr(bad.error, "code", None) == POISONS[poison][1]


@pytest.mark.long
def test_B03_three_poisons_within_a_minute_are_not_the_machines_failure(tmp_path: Path) -> None:
    poisons = ("crash, prefill", "unknown, prefill", "GPU hang, token 3")
    with served(model(tmp_path / "model"), tmp_path, 1) as server:
        check(play(server, poisons, 2, ROUND_S), poisons)
        lives = len(server.autopsies())
        outcome = play(server, ("crash, token 40",), 2, ROUND_S)
        assert (outcome.codes, outcome.retryable) == (["crashed"], [False])
        assert [text for text in outcome.texts if text != TALE] == []
        assert len(server.autopsies()) - lives <= 3
