"""Requests with penalties, filters, biases and several choices, whose worker is lost: each choice
has the text that it has when it is undisturbed and alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.api_client import CHAT, TEXT, Json, user
from support.chaos_client import QUICK_RETRIES
from support.server import Server, serving, wait_for

BUDGETS = {
    **QUICK_RETRIES,
    "drain_s": 0.3,
}
BEGUN = 20
"""Chunks that each stream has when its worker is struck."""
TOKENS = 250
TRIES = 3
PENALTIES: Json = {
    "presence_penalty": 0.7,
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.3,
    "logit_bias": {"40": 3, "41": -5, "42": -100},
}
REPETITIONS: Json = {
    "allowed_token_ids": list(range(300, 340)),
    **{"dry_multiplier": 0.8, "dry_allowed_length": 1, "dry_sequence_breakers": ["a", "th"]},
    **{"repetition_penalty": 1.2, "repetition_context_size": 9, "presence_penalty": 0.5},
}
"""Penalties that depend on the order of tokens, among so few that repetitions are frequent."""
FILTERS: Json = {
    **{"xtc_probability": 0.5, "xtc_threshold": 0.02, "typical_p": 0.9, "top_n_sigma": 3},
    "bad_words": ["a", "the", "en"],
}
SAMPLED: Json = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
ASKED: dict[str, tuple[str, Json]] = {
    "penalties, greedy": (CHAT, {"temperature": 0, **PENALTIES, "logprobs": True}),
    "penalties, sampled": (CHAT, {**SAMPLED, **PENALTIES, "logprobs": True}),
    "three choices": (CHAT, {**SAMPLED, "n": 3, "logprobs": True}),
    "two choices with penalties": (CHAT, {**SAMPLED, **PENALTIES, "n": 2, "min_p": 0.02}),
    "choices of unequal length": (CHAT, {**SAMPLED, "n": 3, "stop": ["ab", "th", "q"]}),
    "two prompts, two choices": (TEXT, {**SAMPLED, **PENALTIES, "n": 2, "prompt": ["One", "Two"]}),
    "repetitions": (CHAT, {**SAMPLED, **REPETITIONS, "n": 2, "logprobs": True}),
    "repetitions, greedy": (TEXT, {**REPETITIONS, "temperature": 0, "prompt": "Again"}),
    "filters": (TEXT, {**SAMPLED, **FILTERS, "prompt": ["One", "Two"], "return_token_ids": True}),
    "not streamed": (CHAT, {**SAMPLED, **PENALTIES, "n": 2, "stream": False}),
}


@dataclass
class ChoiceAnswers:
    """Text of each choice; ``begun`` is set when chunks have come."""

    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    usage: Json = field(default_factory=dict)
    rid: str = ""
    streamed: bool = True
    begun: threading.Event = field(default_factory=threading.Event)

    def take(self, answer: Json) -> None:
        assert "error" not in answer, answer
        self.rid = answer["id"]
        for choice in answer["choices"]:
            index = choice["index"]
            assert index not in self.finish, "nothing comes after the end"
            part = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            self.texts[index] = self.texts.get(index, "") + (part.get("content") or "")
            content = (choice.get("logprobs") or {}).get("content") or []
            self.logprobs.setdefault(index, []).extend(token["logprob"] for token in content)
            self.ids.setdefault(index, []).extend(choice.get("token_ids", []))
            if choice["finish_reason"]:
                self.finish[index] = choice["finish_reason"]
        if usage := answer.get("usage"):
            self.usage = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}

    def content(self) -> tuple[Any, ...]:
        return self.texts, self.ids, self.finish, self.usage


def ask(server: Server, name: str, answer: ChoiceAnswers) -> ChoiceAnswers:
    path, fields = ASKED[name]
    prompt = {"messages": [user(f"Write about {name}.")]} if path == CHAT else {}
    body = {"model": server.model, "max_tokens": TOKENS, "stream": True, **prompt, **fields}
    if not body["stream"]:
        answer.begun.set()
        answer.streamed = False
        answer.take(server.post(path, body).json())
        return answer
    body["stream_options"] = {"include_usage": True}
    with server.http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        chunks = (line for line in response.iter_lines() if line.startswith("data: {"))
        for number, line in enumerate(chunks):
            if number >= BEGUN:
                answer.begun.set()
            answer.take(json.loads(line.removeprefix("data: ")))
    answer.begun.set()  # what a client was late for comes to it in fewer chunks
    return answer


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with one worker, so that a fault meets every running request."""
    with serving(tiny_model, tmp_path_factory.mktemp("choices"), budgets=BUDGETS) as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> dict[str, ChoiceAnswers]:
    """Answers of requests that run one after the other."""
    return {name: ask(server, name, ChoiceAnswers()) for name in ASKED}


def continued(server: Server) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    found = (line for line in lines if line.startswith("mayfly_continuations_total{"))
    return sum(float(line.split()[-1]) for line in found)


SIGNALS = {
    "sigkill": signal.SIGKILL,
    "sigsegv": signal.SIGSEGV,
    "sigstop": signal.SIGSTOP,
    "handover": signal.SIGTERM,
}


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(sent, id=name, marks=[] if name == "sigkill" else pytest.mark.long)
        for name, sent in SIGNALS.items()
    ],
)
def test_every_choice_says_what_it_says_undisturbed(
    server: Server, undisturbed: dict[str, ChoiceAnswers], sent: signal.Signals
) -> None:
    tries = (interrupts_all(server, undisturbed, sent) for _ in range(TRIES))
    assert any(tries), "a stream was over each time when the signal was sent"


def interrupts_all(
    server: Server, undisturbed: dict[str, ChoiceAnswers], sent: signal.Signals
) -> bool:
    """Sends a signal while all choices are asked for; True if every stream was running then."""
    before = wait_for(lambda: (s := server.slot())["state"] == "ready" and s, "a worker")
    losses, moved = len(server.autopsies()), continued(server)
    answers = {name: ChoiceAnswers() for name in ASKED}
    with ThreadPoolExecutor(len(ASKED)) as pool:
        asked = [pool.submit(ask, server, name, answer) for name, answer in answers.items()]
        assert all(answer.begun.wait(30) for answer in answers.values())
        # A worker that a busy machine slowed down may have been replaced since.
        with contextlib.suppress(ProcessLookupError):
            os.kill(before["pid"], sent)
        for each in asked:
            each.result()
    for name, answer in answers.items():
        assert answer.content() == undisturbed[name].content(), name
        for index, found in answer.logprobs.items():
            assert found == pytest.approx(undisturbed[name].logprobs[index], abs=1e-4), name

    streamed = [answer.rid for answer in answers.values() if answer.streamed]
    if continued(server) - moved < len(streamed):
        return False
    crumbs = [autopsy["breadcrumb"]["requests"] for autopsy in server.autopsies()[losses:]]
    return all(rid in " ".join(crumb) for crumb in crumbs for rid in streamed)
