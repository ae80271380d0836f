"""Validation of requests on both generating routes. docs/reported-faults.md lists ids such as R28
in test names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mayfly_protocol.requests import Constraint, TextPrompt, TokenPrompt
from support.front_client import CHAT, TEXT, TOOL, USER, Client, check_error
from support.running_front import RunningFront

both = pytest.mark.parametrize("path", [CHAT, TEXT])


@both
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("max_tokens", bad) for bad in (-1, 1.5, "8", True, -(10**12))],
        *[("stop", bad) for bad in ("", [""], ["", "zz"], ["a"] * 65, [5], 5, {"a": 1})],
        *[("stream_options", bad) for bad in ("yes", 1, [])],
        *[("stream", bad) for bad in ("true", 1, 0, "")],
        *[("seed", bad) for bad in ("1", 1.5, True)],
        *[("top_k", bad) for bad in (-2, "1", 1.5, True)],
        *[("top_p", bad) for bad in (2.0, -0.1, "x", True, [0.5])],
        *[("temperature", bad) for bad in ("x", -1, 2.1, True, {})],
        *[("min_p", bad) for bad in (2, -0.1, "0")],
        *[("repetition_penalty", bad) for bad in (-1, 0, 1e30, "1")],
        *[("presence_penalty", bad) for bad in (99, -2.1, "0")],
        *[("frequency_penalty", bad) for bad in (-3, "a", True)],
        *[("n", bad) for bad in (0, -1, 129, 10**9, 1.5, "1", True)],
        *[("min_tokens", bad) for bad in (-1, 2**31, "1")],
        *[("stop_token_ids", bad) for bad in ([-1], ["1"], 1, [True])],
        *[("ignore_eos", bad) for bad in (1, "true")],
        *[("logit_bias", bad) for bad in ([1, 2], {"abc": 1}, {"-1": 5}, {"1.5": 5}, "x")],
        *[("typical_p", bad) for bad in (-0.1, 1.1, "1")],
        *[("top_n_sigma", bad) for bad in (-2, 10**4, True)],
        *[("xtc_probability", bad) for bad in (-0.1, 1.1, True)],
        *[("xtc_threshold", bad) for bad in (-0.1, 1.1, "0")],
        *[("dry_multiplier", bad) for bad in (-1, 101, "0")],
        *[("dry_base", bad) for bad in (0.9, 101)],
        *[("dry_allowed_length", bad) for bad in (-1, 513, 1.5)],
        *[("dry_penalty_last_n", bad) for bad in (-2, "1")],
        *[("dry_sequence_breakers", bad) for bad in ([], [""], "a", ["a"] * 33, ["a" * 129])],
        *[("mirostat", bad) for bad in (1, 2, True)],
        *[("dynatemp_range", bad) for bad in (0.5, 1)],
        *[("samplers", bad) for bad in (["top_k"],)],
        *[("min_keep", bad) for bad in (2,)],
        *[("repeat_penalty", bad) for bad in (0, 11)],
        *[("repeat_last_n", bad) for bad in (-2, 1.5)],
        *[("repetition_context_size", bad) for bad in (0, -1, "20")],
        *[("bad_words", bad) for bad in ("a", [1], [" "], [""], ["a"] * 257, ["a" * 257])],
        *[("allowed_token_ids", bad) for bad in ([-1], ["1"], 1, [True], [2**31])],
        *[("truncate_prompt_tokens", bad) for bad in (0, -2, "1", 1.5)],
        *[("skip_special_tokens", bad) for bad in (0, "false")],
        *[("return_token_ids", bad) for bad in (1, "true")],
        *[("structured_outputs", bad) for bad in (1, "a", ["a"])],
        *[("grammar", bad) for bad in ('root ::= "a"',)],
        *[("regex", bad) for bad in (1, ["a"])],
        *[("guided_regex", bad) for bad in ("", 1, [])],
        *[("guided_choice", bad) for bad in ([], "a", [1])],
        *[("guided_json", bad) for bad in (1, "nope", [], "[1]", "NaN")],
        *[("model", bad) for bad in (1, ["m"], True)],
        *[("user", bad) for bad in (1, {})],
    ],
)
def test_R67_bad_values_are_refused_alike_on_every_route(
    client: Client, path: str, field: str, value: Any
) -> None:
    response = client.post(path, **{field: value})
    param = response.json()["error"]["param"]
    assert param.partition("[")[0] == field
    check_error(response, 400, param)


@both
@pytest.mark.parametrize("bias", [None, True, "1", 101, -101])
def test_R40_bad_biases(client: Client, path: str, bias: Any) -> None:
    client.refused(path, "logit_bias.1", logit_bias={"1": bias})


@both
@pytest.mark.parametrize(
    "raw",
    [
        '"temperature": NaN',
        '"temperature": Infinity',
        '"logit_bias": {"1": 1e999}',
        '"seed": 1e999',
    ],
)
def test_R40_numbers_that_are_none(front: RunningFront, path: str, raw: str) -> None:
    body = f'{{"messages": [{json.dumps(USER)}], "prompt": "hi", {raw}}}'
    response = front.client.post(path, content=body, headers={"content-type": "application/json"})
    assert check_error(response, 400, None)["code"] == "invalid_json"


@both
def test_R28_a_huge_max_tokens_is_clamped(client: Client, path: str) -> None:
    assert client.taken(path, max_tokens=10**12).generation.ending.max_tokens == 2**31 - 1


def test_R28_zero_tokens_of_chat(client: Client) -> None:
    client.refused(CHAT, max_tokens=0)
    client.refused(CHAT, max_completion_tokens=0)


def test_R55_zero_tokens_only_with_an_echo(client: Client) -> None:
    client.refused(TEXT, max_tokens=0)
    generation = client.taken(TEXT, max_tokens=0, echo=True).generation
    assert (generation.ending.max_tokens, generation.output.echo) == (0, True)


@both
def test_R23_null_is_the_default(client: Client, path: str) -> None:
    common = (
        *("max_tokens", "temperature", "top_p", "stop", "n", "seed", "stream_options", "user"),
        *("logit_bias", "model", "stream", "top_k", "min_p", "presence_penalty", "min_tokens"),
        *("frequency_penalty", "repetition_penalty", "logprobs", "stop_token_ids", "ignore_eos"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "bad_words"),
        *("structured_outputs", "json_schema", "regex", "allowed_token_ids", "typical_p"),
        *("truncate_prompt_tokens", "skip_special_tokens", "return_token_ids", "mirostat"),
        *("dry_multiplier", "dry_sequence_breakers", "xtc_probability", "repeat_last_n"),
    )
    own = {
        CHAT: (
            *("tools", "tool_choice", "response_format", "parallel_tool_calls", "top_logprobs"),
            *("max_completion_tokens", "reasoning_effort", "metadata", "store", "modalities"),
            *("audio", "prediction", "functions", "function_call", "chat_template_kwargs"),
            *("service_tier", "web_search_options", "prompt_cache_key", "chat_template"),
        ),
        TEXT: ("echo", "best_of", "suffix"),
    }
    bare = client.taken(path).generation
    nulls = client.taken(path, **dict.fromkeys(common + own[path])).generation
    assert nulls.ending == bare.ending
    assert nulls.output == bare.output
    assert nulls.sampling.temperature == 1.0
    assert nulls.sampling.seed != bare.sampling.seed, "each request draws its own"


@both
def test_R38_disabled_and_boundless_top_k(client: Client, path: str) -> None:
    for value in (0, -1, 2**63 - 1):
        assert client.taken(path, top_k=value).generation.sampling.top_k == 0
    assert client.taken(path, top_k=5).generation.sampling.top_k == 5


@both
def test_R38_a_string_is_no_boolean(client: Client, path: str) -> None:
    options = {"include_usage": "yes"}
    client.refused(path, "stream_options.include_usage", stream=True, stream_options=options)


@both
def test_R38_stream_options_need_a_stream(client: Client, path: str) -> None:
    client.refused(path, "stream_options", stream_options={"include_usage": True})
    client.taken(path, stream_options={})
    client.taken(path, stream_options={"include_usage": False})


@both
def test_continuous_usage_needs_usage(client: Client, path: str) -> None:
    options = {"continuous_usage_stats": True}
    param = "stream_options.continuous_usage_stats"
    client.refused(path, param, stream=True, stream_options=options)


@both
def test_R39_top_p_zero_and_next_to_no_temperature_are_greedy(client: Client, path: str) -> None:
    for body in ({"top_p": 0}, {"temperature": 0}, {"temperature": 1e-30}):
        sampling = client.taken(path, **body).generation.sampling
        assert (sampling.temperature, sampling.top_p) == (0.0, 1.0)


@both
def test_R39_no_model_has_no_name(client: Client, path: str) -> None:
    assert check_error(client.post(path, model=""), 404, "model")["code"] == "model_not_found"


@both
def test_every_sampling_field_reaches_the_worker(client: Client, path: str) -> None:
    generation = client.taken(
        path,
        **{"model": "tiny", "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05},
        **{"seed": 11, "presence_penalty": 0.5, "frequency_penalty": -0.5},
        **{"repetition_penalty": 1.3, "logit_bias": {"5": -100, "7": 1.5}},
        **{"stop": "zz", "stop_token_ids": [3], "min_tokens": 2, "ignore_eos": True},
        **{"include_stop_str_in_output": True, "max_tokens": 9, "n": 2},
    ).generation
    sampling, ending = generation.sampling, generation.ending
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 40)
    assert (sampling.min_p, sampling.seed, sampling.repetition_penalty) == (0.05, 11, 1.3)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert sampling.logit_bias == ((5, -100.0), (7, 1.5))
    assert (ending.stop, ending.stop_token_ids, ending.max_tokens) == (("zz",), (3,), 9)
    assert (ending.min_tokens, ending.ignore_eos, ending.include_stop) == (2, True, True)
    assert generation.n == 2


@both
def test_more_tokens_demanded_than_allowed(client: Client, path: str) -> None:
    client.refused(path, "min_tokens", min_tokens=5, max_tokens=4)


@both
def test_constraints_exclude_each_other(client: Client, path: str) -> None:
    client.refused(path, "guided_choice", guided_choice=["a"], guided_regex="b")


@both
@pytest.mark.parametrize(
    ("field", "value", "constraint"),
    [
        ("guided_regex", "[ab]+", ("regex", "[ab]+")),
        ("guided_choice", ["a", "b"], ("choice", '["a", "b"]')),
        ("guided_grammar", "start: A", ("grammar", "start: A")),
        ("guided_json", {"type": "null"}, ("json_schema", '{"type": "null"}')),
        ("guided_json", '{"type":"null"}', ("json_schema", '{"type": "null"}')),
        ("json_schema", {"type": "null"}, ("json_schema", '{"type": "null"}')),
        ("regex", "[ab]+", ("regex", "[ab]+")),
    ],
)
def test_constraints(
    client: Client, path: str, field: str, value: Any, constraint: tuple[Any, str]
) -> None:
    found = client.taken(path, **{field: value}).generation.output.constraint
    assert found == Constraint(*constraint, param=field)


@both
@pytest.mark.parametrize("asked", [{"ignore_eos": True}, {"min_tokens": 1}])
def test_an_output_ends_with_its_format(client: Client, path: str, asked: dict[str, Any]) -> None:
    [param] = asked
    client.refused(path, param, guided_choice=["a"], **asked)
    if path == CHAT:
        client.refused(path, param, tools=[TOOL], tool_choice="required", **asked)
    client.taken(path, guided_choice=["a"], ignore_eos=False, min_tokens=0)


@pytest.mark.parametrize("asked", [True, 6, -1, "1", 1.0, False])
def test_R44_logprobs_of_completions_are_a_small_number(client: Client, asked: Any) -> None:
    client.refused(TEXT, logprobs=asked)


def test_R44_what_completions_do_and_do_not(client: Client) -> None:
    client.refused(TEXT, best_of=2)
    client.refused(TEXT, "best_of", best_of=3, n=2)
    assert client.taken(TEXT, best_of=2, n=2).generation.n == 2
    assert client.taken(TEXT, logprobs=0).generation.output.logprobs == 0
    assert client.taken(TEXT, echo=True).generation.output.echo


def test_R56_suffix(client: Client) -> None:
    client.refused(TEXT, suffix="):\n  pass")
    client.taken(TEXT, suffix="")
    client.taken(TEXT, suffix=None)


@pytest.mark.parametrize("prompt", [[], [[]], ["a", [1]], [1, "a"], [[1], []], None, 5, {}, [True]])
def test_R49_R51_prompts_that_are_none(client: Client, prompt: Any) -> None:
    client.refused(TEXT, prompt=prompt)


def test_R49_a_prompt_is_needed_and_may_be_empty_text(front: RunningFront, client: Client) -> None:
    response = front.client.post(TEXT, json={})
    assert check_error(response, 400, "prompt")["code"] == "missing_required_parameter"
    assert client.taken(TEXT, prompt="").generation.prompt == TextPrompt("")
    assert client.taken(TEXT, prompt=[""]).generation.prompt == TextPrompt("")


def test_R51_forms_of_a_prompt(client: Client) -> None:
    assert client.taken(TEXT, prompt=["ab"]).generation.prompt == TextPrompt("ab")
    assert client.taken(TEXT, prompt=[1, 2]).generation.prompt == TokenPrompt((1, 2))
    assert client.taken(TEXT, prompt=[[1, 2]]).generation.prompt == TokenPrompt((1, 2))
    response = client.post(TEXT, prompt=["a", "b"], n=2, seed=5)
    assert [choice["index"] for choice in response.json()["choices"]] == [0, 1, 2, 3]
    assert response.json()["usage"]["prompt_tokens"] == 14
    two = client.worker.submits[-2:]
    assert {submit.generation.prompt for submit in two} == {TextPrompt("a"), TextPrompt("b")}
    assert {submit.generation.sampling.seed for submit in two} == {5}
    assert len({submit.rid for submit in two}) == 2


def test_R128_too_many_at_once(client: Client) -> None:
    client.refused(TEXT, prompt=["a"] * 100_000)
    client.refused(TEXT, "n", prompt=["a"] * 2, n=65)
    client.refused(TEXT, best_of=10**9)
