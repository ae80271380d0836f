"""Answers do not depend on requests beside them or before them.

The expected answer is that of the model in this process, alone and from an empty cache.
docs/reported-faults.md lists the ids in test names.
"""

from __future__ import annotations

import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_model, load_tokenizer

from mayfly_protocol.requests import TokenPrompt
from mayfly_worker.engine import caches
from mayfly_worker.model.probe import probe
from mayfly_worker.model.reference_store import ReferenceStore
from support.api_client import (
    CHAT,
    TEXT,
    Json,
    answer,
    choice,
    function,
    together,
    user,
    whole_stream,
)
from support.engine_harness import GREEDY, EngineHarness, EngineRequest
from support.models import tiny as tiny_models
from support.server import Server
from support.worker import AttemptAnswer, WorkerProcess, generation

SYSTEM = "You are the archivist of a small museum and answer in complete sentences. " * 6


class ColdModel:
    """A model folder's greedy answers without a server."""

    def __init__(self, folder: Path) -> None:
        self._model = load_model(folder)[0]
        self._tokenizer = load_tokenizer(folder)
        self._width = probe(
            self._model, caches.factory(self._model), ReferenceStore.of("", "")
        ).width
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def ids(self, prompt: list[int], max_tokens: int) -> list[int]:
        key = (tuple(prompt), max_tokens)
        if key not in self._known:
            [found] = EngineHarness(self._model, self._width).run(
                [EngineRequest(prompt, GREEDY, max_tokens)]
            )
            self._known[key] = found.ids()
        return self._known[key]

    def text(self, prompt: str, max_tokens: int) -> str:
        return self._decoded(self._tokenizer.encode(prompt), max_tokens)

    def chat(self, messages: list[Json], max_tokens: int) -> str:
        prompt = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return self._decoded(prompt, max_tokens)

    def _decoded(self, prompt: list[int], max_tokens: int) -> str:
        text: str = self._tokenizer.decode(self.ids(prompt, max_tokens))
        return text


@pytest.fixture(scope="module")
def cold(tools_model: Path) -> ColdModel:
    """Cold answers of the model that ``tiny`` serves."""
    return ColdModel(tools_model)


def text(server: Server, prompt: str, max_tokens: int, **fields: Any) -> str:
    found: str = choice(server, TEXT, prompt=prompt, max_tokens=max_tokens, **fields)["text"]
    return found


def later(seconds: float, call: Any) -> Any:
    time.sleep(seconds)
    return call()


@pytest.mark.parametrize("turns", [12, pytest.param(60, marks=pytest.mark.long)])
def test_R87_penalties_and_biases_beside_a_plain_prompt(
    tiny: Server, cold: ColdModel, turns: int
) -> None:
    rng = random.Random(87)
    extras: list[Json] = [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.0},
        {"frequency_penalty": -2.0},
        {"logit_bias": {"300": 5}},
        {"temperature": 1, "seed": 7, "min_p": 0.05},
        {"temperature": 1, "seed": 8, "top_p": 0.9, "logit_bias": {"300": -100}},
    ]
    alone = [text(tiny, "A short one", 24, **extra) for extra in extras]
    assert len(set(alone)) >= 4
    for turn in range(turns):
        # A new beginning each time, so that nothing of it is cached; several chunks long.
        plain = f"{turn} " + SYSTEM * 3
        which = turn % len(extras)
        streamed, short = together(
            partial(whole_stream, tiny, TEXT, prompt=plain, max_tokens=16),
            partial(
                later,
                rng.uniform(0, 0.2),
                partial(text, tiny, "A short one", 24, **extras[which]),
            ),
        )
        assert streamed.text() == cold.text(plain, 16)
        assert short == alone[which]


@pytest.mark.parametrize("rounds", [3, pytest.param(20, marks=pytest.mark.long)])
def test_R88_sixteen_at_once_get_their_own_answers(
    tiny: Server, cold: ColdModel, rounds: int
) -> None:
    conversations = [
        [{"role": "system", "content": SYSTEM}, user(f"Tell me about exhibit {100 + 7 * i}.")]
        for i in range(16)
    ]
    right = [cold.chat(messages, 32) for messages in conversations]
    assert len(set(right)) == 16
    rng = random.Random(88)
    for _ in range(rounds):
        order = rng.sample(range(16), 16)
        found = together(
            *(partial(choice, tiny, CHAT, messages=conversations[i], max_tokens=32) for i in order)
        )
        assert [one["text"] for one in found] == [right[i] for i in order]


def test_R92_an_answer_sent_back_as_part_of_the_prompt(tiny: Server, cold: ColdModel) -> None:
    prompt = "In the beginning there was a very long sentence about nothing in particular, and"
    for _ in range(4):
        said = text(tiny, prompt, 10)
        assert said == cold.text(prompt, 10)
        prompt += said
    again = answer(tiny, TEXT, prompt=prompt, max_tokens=10)
    same = answer(tiny, TEXT, prompt=prompt, max_tokens=10)
    assert again["choices"] == same["choices"]
    used = same["usage"]
    assert used["prompt_tokens_details"]["cached_tokens"] == used["prompt_tokens"] - 1


def test_R93_earlier_prompts_leave_no_trace(tiny: Server, cold: ColdModel) -> None:
    a = SYSTEM + "First question."
    b = SYSTEM + "Second question, which is longer than the first."
    c = SYSTEM[:200] + " Something else."
    for prompt in (a, b, c, c, b, a):
        assert text(tiny, prompt, 24) == cold.text(prompt, 24)


def test_R94_a_new_question_after_the_same_system_prompt(tiny: Server, cold: ColdModel) -> None:
    system = {"role": "system", "content": SYSTEM + "You like lists."}
    for question in ("Who built it?", "When was it opened?", "What is on the second floor?"):
        messages = [system, user(question)]
        found = answer(tiny, CHAT, messages=messages, max_tokens=64)
        assert found["choices"][0]["message"]["content"] == cold.chat(messages, 64)
        assert found["usage"]["completion_tokens"] == 64
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] > 50


def test_R97_four_of_the_same_at_once_are_the_same(tiny: Server, cold: ColdModel) -> None:
    for turn in range(10):
        prompt = f"{turn} times the same question"
        found = together(*[partial(text, tiny, prompt, 40)] * 4)
        assert found == [cold.text(prompt, 40)] * 4


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next"])
def test_R90_R93_whatever_the_cache_can_do(architecture: str, tmp_path: Path) -> None:
    """A long prompt, then short ones that are its beginning, on a real worker."""
    folder = tiny_models.build(tmp_path / "model", architecture=architecture)
    cold = ColdModel(folder)
    rng = random.Random(90)
    long = [rng.randrange(8, 1700) for _ in range(360)]
    short, other = long[:60], long[:60] + [rng.randrange(8, 1700) for _ in range(20)]
    with WorkerProcess(folder, tmp_path) as worker:
        worker.wait_ready()
        for prompt in (long, short, short, other, long, other):
            found = worker.ask(generation(TokenPrompt(tuple(prompt)), max_tokens=20))
            assert found.ids() == cold.ids(prompt, 20)


def in_flight(worker: WorkerProcess, prompts: list[list[int]], most: int) -> list[AttemptAnswer]:
    """Asks for all of them, so many at a time."""
    answers: list[AttemptAnswer] = []
    for prompt in prompts:
        answers.append(worker.submit(generation(TokenPrompt(tuple(prompt)), max_tokens=8)))
        worker.wait(lambda: sum(not a.end for a in answers) < most, "room for another one")
    worker.wait(lambda: all(a.end for a in answers), "the last answers")
    return answers


@pytest.mark.parametrize("count", [120, pytest.param(2000, marks=pytest.mark.long)])
def test_R96_a_tree_of_prompts_in_a_cache_that_evicts_all_the_time(
    tiny_model: Path, tmp_path: Path, count: int
) -> None:
    cold = ColdModel(tiny_model)
    rng = random.Random(96)
    tree: list[list[int]] = [[rng.randrange(8, 1700) for _ in range(30)]]
    while len(tree) < 25:
        branch = rng.choice(tree)
        kept = branch[: rng.choice([20, len(branch)])]
        tree.append(kept + [rng.randrange(8, 1700) for _ in range(rng.randrange(1, 40))])
    asked = [rng.choice(tree) for _ in range(count)]
    with WorkerProcess(tiny_model, tmp_path, prefix_cache=100_000) as worker:
        worker.wait_ready()
        answers = in_flight(worker, asked, most=8)
    for prompt, found in zip(asked, answers, strict=True):
        assert found.ids() == cold.ids(prompt, 8)


@pytest.mark.parametrize("trigger", ["[text]", "[call]", "[said and called]", "[two calls]"])
def test_R92_the_next_turn_finds_the_whole_answer_cached(script: Server, trigger: str) -> None:
    tools = [function("sum", x="integer", y="integer"), function("glob", pattern="string")]
    fields: Json = {"tools": tools, "max_tokens": 200}
    asked = user(f"{trigger} and so on")
    found = answer(script, CHAT, messages=[asked], **fields)
    said = found["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "11"}
        for call in said.get("tool_calls", [])
    ]
    later = [asked, said, *(results or [user("And?")])]
    used = answer(script, CHAT, messages=later, **fields)["usage"]["prompt_tokens_details"]
    assert used["cached_tokens"] >= found["usage"]["total_tokens"] - 1  # but for the end token
