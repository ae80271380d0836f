"""Sampling fields of llama.cpp, mlx-lm and vLLM, from the request to the worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from mayfly_protocol.requests import Constraint, Dry, Sampling, TextPrompt
from mayfly_protocol.serving import Accepted, Submit
from support.doubles.fake_node import FakeNode, ScriptStep, finish, step, token_id
from support.front_client import CHAT, TEXT, TOOL, USER, Client
from support.running_front import RunningFront

both = pytest.mark.parametrize("path", [CHAT, TEXT])
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
IDS = [token_id(position) for position in range(3)]
EVERY = {
    CHAT: {"messages": [USER]},
    TEXT: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"max_tokens": 9, "messages": [USER]},
}


def sampling_of(client: Client, path: str, **asked: Any) -> Sampling:
    response = client.http.post(path, json=EVERY[path] | asked)
    assert response.status_code == 200, response.text
    assert "mayfly-ignored" not in response.headers
    return client.worker.submits[-1].generation.sampling


@pytest.mark.parametrize("path", EVERY)
def test_every_api_takes_further_samplers(client: Client, path: str) -> None:
    found = sampling_of(
        client,
        path,
        **{"typical_p": 0.9, "top_n_sigma": 1, "xtc_probability": 0.5, "xtc_threshold": 0.2},
        **{"dry_multiplier": 0.8, "dry_base": 2, "dry_allowed_length": 3, "seed": 1},
        **{"dry_penalty_last_n": 100, "dry_sequence_breakers": ["\n", "User:"]},
    )
    assert (found.typical_p, found.top_n_sigma) == (0.9, 1)
    assert (found.xtc_probability, found.xtc_threshold) == (0.5, 0.2)
    assert found.dry == Dry(0.8, 2, 3, 100, ("\n", "User:"))


def test_defaults_are_those_of_llama_cpp(client: Client) -> None:
    assert sampling_of(client, CHAT, xtc_probability=1).xtc_threshold == 0.1
    dry = sampling_of(client, CHAT, dry_multiplier=0.5).dry
    assert dry is not None
    assert (dry.base, dry.allowed_length, dry.breakers) == (1.75, 2, ("\n", ":", '"', "*"))
    assert dry.window is not None and dry.window > 10**9


@pytest.mark.parametrize(
    "neutral",
    [
        {"typical_p": 1, "top_n_sigma": 0, "xtc_probability": 0},
        {"top_n_sigma": -1, "dry_multiplier": 0, "dry_sequence_breakers": ["x"]},
        {"dry_multiplier": 1, "dry_penalty_last_n": 0},
        {"mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1},
        {"mirostat": False},
        {"dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "min_keep": 0, "samplers": []},
        {"repeat_penalty": 1.0},
    ],
)
@pytest.mark.parametrize("path", EVERY)
def test_neutral_values_ask_for_nothing(client: Client, path: str, neutral: dict[str, Any]) -> None:
    plain, found = sampling_of(client, path, seed=3), sampling_of(client, path, seed=3, **neutral)
    off = (found.typical_p, found.top_n_sigma, found.xtc_probability, found.dry)
    assert off == (1.0, 0.0, 0.0, None)
    assert found.repetition_penalty == plain.repetition_penalty == 1.0


@both
@pytest.mark.parametrize(
    ("seed", "meant"),
    [(0, 0), (-2, 2**64 - 2), (-(2**63), 2**63), (2**63, 2**63), (2**64 - 1, 2**64 - 1)],
)
def test_negative_seeds_are_those_of_64_bits(
    client: Client, path: str, seed: int, meant: int
) -> None:
    assert sampling_of(client, path, seed=seed).seed == meant


@pytest.mark.parametrize("path", EVERY)
def test_a_seed_of_minus_one_is_none(client: Client, path: str) -> None:
    assert len({sampling_of(client, path, seed=-1).seed for _ in range(3)}) == 3
    several = client.post(TEXT, prompt=["a", "b"], seed=-1)
    assert several.status_code == 200
    assert len({s.generation.sampling.seed for s in client.worker.submits[-2:]}) == 2


@pytest.mark.parametrize(
    ("asked", "penalty", "windows"),
    [
        ({"repetition_penalty": 1.2}, 1.2, (None, None, None)),
        ({"repetition_penalty": 1.2, "repetition_context_size": 20}, 1.2, (20, None, None)),
        ({"presence_context_size": 5, "frequency_context_size": 6}, 1.0, (None, 5, 6)),
        ({"repeat_penalty": 1.1}, 1.1, (64, None, None)),
        ({"repeat_penalty": 1.1, "repeat_last_n": 9}, 1.1, (9, 9, 9)),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.1}, 1.1, (None, None, None)),
        ({"repeat_last_n": 9, "presence_context_size": 5}, 1.0, (9, 5, 9)),
        ({"repeat_last_n": -1}, 1.0, (2**31 - 1,) * 3),
        ({"repeat_last_n": 0}, 1.0, (0, 0, 0)),
    ],
)
def test_windows_of_penalties(
    client: Client, asked: dict[str, Any], penalty: float, windows: tuple[Any, ...]
) -> None:
    found = sampling_of(client, CHAT, **asked)
    assert found.repetition_penalty == penalty
    assert (found.repetition_window, found.presence_window, found.frequency_window) == windows
    assert ("repetition_penalty" in found.unnamed) == (penalty == 1.0)


def test_two_names_of_one_penalty_agree(client: Client) -> None:
    client.refused(CHAT, "repeat_penalty", repeat_penalty=1.1, repetition_penalty=1.2)


@both
def test_words_and_ids(client: Client, path: str) -> None:
    found = sampling_of(client, path, bad_words=["foo", " bar"], allowed_token_ids=[5, 7, 5])
    assert (found.bad_words, found.allowed_ids) == (("foo", " bar"), (5, 7))
    for asked in ({"bad_words": ["a"]}, {"allowed_token_ids": [3]}):
        client.refused(path, next(iter(asked)), **asked, guided_choice=["a"])
    if path == CHAT:
        client.refused(path, "bad_words", bad_words=["a"], tools=[TOOL], tool_choice="required")


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bad_words", ["a"]),
        ("allowed_token_ids", [1]),
        ("truncate_prompt_tokens", 5),
        ("return_token_ids", True),
        ("skip_special_tokens", False),
    ],
)
def test_fields_of_chats_alone_say_so(client: Client, path: str, field: str, value: Any) -> None:
    response = client.http.post(path, json=EVERY[path] | {field: value})
    assert response.status_code == 400
    assert "/v1/chat/completions" in response.json()["error"]["message"]
    idle = {"bad_words": [], "skip_special_tokens": True, "return_token_ids": False}
    assert client.http.post(path, json=EVERY[path] | idle).status_code == 200


@both
@pytest.mark.parametrize(
    ("asked", "constraint"),
    [
        ({"json": {"type": "null"}}, ("json_schema", '{"type": "null"}', "json")),
        ({"json": '{"type":"null"}'}, ("json_schema", '{"type": "null"}', "json")),
        ({"regex": "a+"}, ("regex", "a+", "regex")),
        ({"choice": ["a", "b"]}, ("choice", '["a", "b"]', "choice")),
        ({"grammar": "start: A"}, ("grammar", "start: A", "grammar")),
        ({"json_object": True}, ("json_object", "", "json_object")),
        ({"regex": "a", "disable_any_whitespace": True}, ("regex", "a", "regex")),
    ],
)
def test_structured_outputs(
    client: Client, path: str, asked: dict[str, Any], constraint: tuple[Any, str, str]
) -> None:
    found = client.taken(path, structured_outputs=asked).generation.output.constraint
    kind, value, name = constraint
    assert found == Constraint(kind, value, f"structured_outputs.{name}")


@both
def test_structured_outputs_that_are_refused(client: Client, path: str) -> None:
    none = ({}, {"json_object": False}, {"json": None})
    for nothing in none:
        taken = client.taken(path, structured_outputs=nothing)
        assert taken.generation.output.constraint is None
    two = {"regex": "a", "choice": ["b"]}
    client.refused(path, "structured_outputs.choice", structured_outputs=two)
    client.refused(path, "guided_regex", structured_outputs={"regex": "a"}, guided_regex="a")
    for field, value in (("structural_tag", "{}"), ("whitespace_pattern", " *"), ("more", 1)):
        asked = {"regex": "a", field: value}
        client.refused(path, f"structured_outputs.{field}", structured_outputs=asked)
    client.refused(path, "structured_outputs.json", structured_outputs={"json": "nope"})


@both
def test_texts_and_prompts(client: Client, path: str) -> None:
    plain = client.taken(path).generation
    assert (plain.prompt_limit, plain.output.special_tokens) == (None, False)
    asked = client.taken(path, truncate_prompt_tokens=7, skip_special_tokens=False).generation
    assert (asked.prompt_limit, asked.output.special_tokens) == (7, True)
    assert client.taken(path, truncate_prompt_tokens=-1).generation.prompt_limit == -1
    if path == TEXT:
        client.refused(path, "truncate_prompt_tokens", truncate_prompt_tokens=3, echo=True)
        bare = client.taken(path, add_special_tokens=False).generation.prompt
        assert bare == TextPrompt("hi", special=False)
    else:
        client.taken(path, add_special_tokens=False)
        client.refused(path, add_special_tokens=True)


@both
@pytest.mark.parametrize(
    ("field", "value", "off"),
    [
        ("return_tokens_as_token_ids", True, False),
        ("n_probs", 3, 0),
        ("adapters", "folder", None),
        ("role_mapping", {"user": "USER"}, {}),
    ],
)
def test_other_names_for_what_there_is(
    client: Client, path: str, field: str, value: Any, off: Any
) -> None:
    assert "Use " in client.refused(path, field, **{field: value})["message"]
    client.taken(path, **{field: off})


@both
def test_sixty_four_stop_strings(client: Client, path: str) -> None:
    stops = [f"stop {n}" for n in range(64)]
    assert client.taken(path, stop=stops).generation.ending.stop == tuple(stops)


def with_ids(submit: Submit) -> Iterator[ScriptStep]:
    """A fake worker's script: a text of three tokens, of which the second has no text yet."""
    ids = (5, 6, 7) if submit.generation.output.prompt_ids else ()
    yield Accepted(submit.rid, submit.attempt, 3, ids)
    yield step(submit, 0, "a")
    yield step(submit, 1, "")
    yield step(submit, 2, "b", finish="stop")
    yield finish(submit, 3)


@pytest.fixture(scope="module")
def scripted() -> Iterator[Client]:
    with FakeNode() as node:
        worker = node.worker(with_ids)
        with RunningFront(node.control) as front:
            yield Client(front.client, worker)


@both
@pytest.mark.parametrize("usage", [False, True])
def test_token_ids_in_a_stream(scripted: Client, path: str, usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    response = scripted.post(path, stream=True, return_token_ids=True, **options)
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    found = [id for choice in choices for id in choice.get("token_ids", [])]
    assert found == IDS
    prompts = [part.get("prompt_token_ids") for part in (chunks if path == CHAT else choices)]
    assert prompts == [[5, 6, 7], *[None] * (len(prompts) - 1)]
    plain = scripted.post(path, stream=True)
    assert "token_ids" not in plain.text


@both
def test_token_ids_of_a_whole_answer(scripted: Client, path: str) -> None:
    content = scripted.post(path, return_token_ids=True).json()
    [choice] = content["choices"]
    assert choice["token_ids"] == IDS
    assert (content if path == CHAT else choice)["prompt_token_ids"] == [5, 6, 7]
    assert "token_ids" not in scripted.post(path).text
