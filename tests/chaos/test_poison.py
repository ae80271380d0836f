"""A request that kills every worker that runs it, among many that do not."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from support.chaos_client import QUICK_RETRIES, StreamingClient
from support.chaos_matrix import METAL_HANG, SHAPES
from support.models.scripted import FaultAction, ModelFault, ScriptedReply
from support.server import another_front_end, serving, wait_for

INNOCENTS = 100
AT_ONCE = 16
TRIES = 3
FATAL = 200
BUDGETS = {
    **QUICK_RETRIES,
    "batch_faults": 1000,
    "verdict_wait_s": 10.0,  # a reaper that the machine stops for a second is heard all the same
}
TALE = " ".join(f"line {number}" for number in range(150))


def reply(number: int) -> str:
    """A reply; lengths differ, so that some requests have always just begun."""
    return " ".join(f"{number} says {n}" for n in range(3 + number * 7 % 20))


def replies(poison: ScriptedReply) -> list[ScriptedReply]:
    return [poison, *(ScriptedReply(f"[{n:03}]", reply(n)) for n in range(INNOCENTS))]


def refused(asking: StreamingClient) -> openai.APIError:
    error = asking.error
    assert isinstance(error, openai.APIError), error
    return error


CASES: list[tuple[int | str, FaultAction, str, str, int]] = [
    (FATAL, "segfault", "", "crashed", 3),
]
MORE_CASES: list[tuple[int | str, FaultAction, str, str, int]] = [
    ("prefill", "segfault", "", "crashed", 3),
    ("prefill", "raise", METAL_HANG, "metal_hang", 3),
    (FATAL, "raise", METAL_HANG, "metal_hang", 3),
    ("prefill", "raise", SHAPES, "shape", 0),
    (FATAL, "raise", SHAPES, "shape", 0),
    (FATAL, "abort", "", "aborted", 3),
    (0, "nan", "", "nonfinite_logits", 3),
    (FATAL, "nan", "", "nonfinite_logits", 3),
]


@pytest.mark.parametrize(
    ("at", "action", "message", "kind", "deaths"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE_CASES)],
)
def test_a_poisonous_request_is_found_and_stopped(
    scripted_model: Callable[..., Path],
    tmp_path: Path,
    at: int | str,
    action: FaultAction,
    message: str,
    kind: str,
    deaths: int,
) -> None:
    fault = ModelFault(at, action, message)  # type: ignore[arg-type]
    model = scripted_model(replies(ScriptedReply("[poison]", TALE, [fault])), step_s=0.005)
    options = ("--trust-remote-code", "--workers", "3")
    with (
        serving(model, tmp_path, *options, budgets=BUDGETS) as server,
        another_front_end(tmp_path, server) as other,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        wait_for(lambda: all(s["state"] == "ready" for s in server.slots()), "every worker")

        def ask(number: int) -> str:
            return StreamingClient(server, f"[{number:03}]").result().text

        asked = [pool.submit(ask, number) for number in range(INNOCENTS)]
        wait_for(lambda: sum(each.done() for each in asked) >= 5, "some answers")
        poison = StreamingClient(server, "[poison]")
        error = refused(poison)
        assert error.code == kind
        assert error.body["retryable"] is False  # type: ignore[index]
        said = poison.answer.text
        assert TALE.startswith(said)
        assert bool(said) == (at == FATAL)
        assert [each.result() for each in asked] == [reply(n) for n in range(INNOCENTS)]
        wait_for(lambda: len(server.autopsies()) >= deaths, "a record of every death")
        assert [a["kind"] for a in server.autopsies()] == [kind] * deaths

        # The same again: nobody has to die of it.
        for url in (server.url, other):
            took_s = []
            for seed in (8, 9):
                began = time.monotonic()
                again = refused(StreamingClient(server, "[poison]", url=url, seed=seed))
                took_s.append(time.monotonic() - began)
                assert isinstance(again, openai.InternalServerError)
                assert again.code == kind
                assert again.response.headers["x-should-retry"] == "false"
            assert min(took_s) < 2.0
        assert len(server.autopsies()) == deaths
        assert ask(1) == reply(1)


@pytest.mark.parametrize(
    ("message", "seed"),
    [
        pytest.param(message, seed, marks=[pytest.mark.long] if seed or message == SHAPES else [])
        for message in (METAL_HANG, SHAPES)
        for seed in range(8)
    ],
    ids=lambda value: {METAL_HANG: "worker", SHAPES: "batch"}.get(value),
)
def test_a_random_fault_delays_no_innocent(
    scripted_model: Callable[..., Path], tmp_path: Path, message: str, seed: int
) -> None:
    """Whenever it falls: nobody has to wait behind another for having been there."""
    at = random.Random(seed).randrange(0, 60)
    text = " ".join(f"word {number}" for number in range(30))
    plain = [ScriptedReply(f"[{n:02}]", text) for n in range(AT_ONCE - 1)]
    fault = ModelFault(at, "raise", message, times=1)
    victims = [ScriptedReply(f"[victim {n}]", text, [fault]) for n in range(TRIES)]
    model = scripted_model([*victims, *plain], step_s=0.02)
    options = ("--trust-remote-code", "--workers", "2")
    with serving(model, tmp_path, *options, budgets=BUDGETS) as server:

        def longest_gap_s(victim: ScriptedReply) -> float:
            wait_for(lambda: all(s["state"] == "ready" for s in server.slots()), "every worker")
            asked = [
                StreamingClient(server, each.trigger, prompt_cache_key="together")
                for each in (*plain, victim)
            ]
            answers = [each.result() for each in asked]
            assert [answer.text for answer in answers] == [text] * AT_ONCE
            gaps = sorted(answer.gap_s for answer in answers)
            struck = [gap for gap in gaps if gap > 0.1]
            print(f"at token {at}: {len(struck)} struck, gaps {gaps[0]:.3f} to {gaps[-1]:.3f} s")
            return gaps[-1]

        # One after the other they would take longer, and each time; a busy machine stops them once.
        assert any(longest_gap_s(victim) < 1.0 for victim in victims)
