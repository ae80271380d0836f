"""What a request may hold, on both generating routes. Names like R28 are of public bug reports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mayfly_protocol.requests import ChatPrompt, Constraint, TextPrompt, TokenPrompt
from mayfly_protocol.serving import Submit
from models.fake_engine import FakeNode, FakeWorker
from models.running_front import RunningFront

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def node() -> Iterator[FakeNode]:
    with FakeNode() as node:
        node.worker()
        yield node


@pytest.fixture(scope="module")
def front(node: FakeNode) -> Iterator[RunningFront]:
    with RunningFront(node.control, max_body_bytes=1 << 20) as front:
        yield front


class Client:
    """Posts to the server; knows what has reached the worker."""

    def __init__(self, http: httpx.Client, worker: FakeWorker) -> None:
        self.http = http
        self.worker = worker

    def post(self, path: str, **body: Any) -> httpx.Response:
        needed = {"messages": [USER]} if path == CHAT else {"prompt": "hi"}
        return self.http.post(path, json=needed | body)

    def taken(self, path: str, **body: Any) -> Submit:
        """What the worker was asked for a request that has to be answered."""
        before = len(self.worker.submits)
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        assert len(self.worker.submits) > before
        return self.worker.submits[-1]

    def refused(self, path: str, param: str | None = None, **body: Any) -> dict[str, Any]:
        """The error of a request that has to be refused without asking the worker."""
        before = len(self.worker.submits)
        response = self.post(path, **body)
        assert len(self.worker.submits) == before
        return check_error(response, 400, param or next(iter(body)))


def check_error(response: httpx.Response, status: int, param: str | None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "retryable"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]
    assert error["retryable"] is False
    assert "retry-after" not in response.headers
    return error


@pytest.fixture
def client(front: RunningFront, node: FakeNode) -> Client:
    return Client(front.client, node.workers[0])


both = pytest.mark.parametrize("path", [CHAT, TEXT])


@both
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("max_tokens", bad) for bad in (-1, 1.5, "8", True, -(10**12))],
        *[("stop", bad) for bad in ("", [""], ["", "zz"], ["a"] * 5, [5], 5, {"a": 1})],
        *[("stream_options", bad) for bad in ("yes", 1, [])],
        *[("stream", bad) for bad in ("true", 1, 0, "")],
        *[("seed", bad) for bad in (-1, 2**63, "1", 1.5, True)],
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
        *[("guided_regex", bad) for bad in ("", 1, [])],
        *[("guided_choice", bad) for bad in ([], "a", [1])],
        *[("guided_json", bad) for bad in (1, "nope", [], "[1]", "NaN")],
        *[("model", bad) for bad in (1, ["m"], True)],
        *[("user", bad) for bad in (1, {})],
        ("trust_remote_code", True),
        ("best", 1),
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
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
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


# Chat


def test_R21_empty_messages(client: Client) -> None:
    for stream in (False, True):
        error = client.refused(CHAT, messages=[], stream=stream)
        assert error["code"] == "empty_array"


def test_R12_tool_choice(client: Client) -> None:
    prompt = client.taken(CHAT, tools=[TOOL], tool_choice="required").generation.prompt
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.tool_choice, prompt.forced_tool) == ("required", None)
    client.refused(CHAT, "tool_choice", tools=[TOOL], tool_choice="sometimes")
    client.refused(CHAT, "tool_choice", tool_choice="required")
    client.refused(CHAT, "tool_choice", tool_choice="required", tools=[])


def test_a_named_tool(client: Client) -> None:
    named = {"type": "function", "function": {"name": "sum"}}
    prompt = client.taken(CHAT, tools=[TOOL], tool_choice=named).generation.prompt
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.tool_choice, prompt.forced_tool, prompt.tools) == ("required", "sum", (TOOL,))
    other = {"type": "function", "function": {"name": "other"}}
    client.refused(CHAT, "tool_choice", tools=[TOOL], tool_choice=other)
    client.refused(CHAT, "tool_choice", tools=[TOOL], tool_choice=named | {"more": 1})
    client.refused(CHAT, "tools", tools=[TOOL, TOOL])


def test_R10_no_tools_to_choose_from(client: Client) -> None:
    for body in ({"tools": []}, {}):
        response = client.post(CHAT, tool_choice="none", **body)
        choice = response.json()["choices"][0]
        assert "tool_calls" not in choice["message"]
        assert isinstance(choice["message"]["content"], str)
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "custom"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
        ([TOOL, {"type": "function", "function": {"name": 5}}], "tools[1].function.name"),
        ({}, "tools"),
    ],
)
def test_bad_tools(client: Client, tools: Any, param: str) -> None:
    client.refused(CHAT, param, tools=tools)


@pytest.mark.parametrize(
    "field",
    [
        *("audio", "prediction", "web_search_options", "functions", "function_call"),
        *("chat_template", "moderation", "prompt_cache_options"),
    ],
)
def test_documented_and_not_supported(client: Client, field: str) -> None:
    assert client.refused(CHAT, **{field: {}})["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("store", False, True),
        ("service_tier", "auto", "priority"),
        ("modalities", ["text"], ["audio"]),
        ("verbosity", "medium", "high"),
        ("prompt_cache_retention", "in_memory", "24h"),
        ("metadata", {"a": "b"}, {"a": 1}),
        ("safety_identifier", "me", 1),
        ("parallel_tool_calls", False, "false"),
        ("top_logprobs", None, 21),
        ("logprobs", True, 1),
    ],
)
def test_hints_are_taken_and_demands_refused(
    client: Client, field: str, good: Any, bad: Any
) -> None:
    client.taken(CHAT, **{field: good})
    response = client.post(CHAT, **{field: bad})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(field)


def test_R129_template_arguments_are_few(client: Client) -> None:
    for kwargs in (
        {"tokenize": True},
        {"chat_template": "{{ 1 }}"},
        {"messages": []},
        {"add_generation_prompt": False, "continue_final_message": True},
    ):
        client.refused(CHAT, chat_template_kwargs=kwargs)
    client.refused(CHAT, chat_template="{% for i in range(10**9) %}{% endfor %}")
    prompt = client.taken(
        CHAT, chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low"
    ).generation.prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.template_kwargs == {"enable_thinking": False, "reasoning_effort": "low"}


def test_ways_to_end_a_prompt(client: Client) -> None:
    def flags(**body: Any) -> tuple[bool, bool]:
        prompt = client.taken(CHAT, **body).generation.prompt
        assert isinstance(prompt, ChatPrompt)
        return prompt.add_generation_prompt, prompt.continue_final_message

    assert flags() == (True, False)
    assert flags(continue_final_message=True) == (False, True)
    assert flags(add_generation_prompt=False) == (False, False)
    client.refused(CHAT, continue_final_message=True, add_generation_prompt=True)


def test_max_completion_tokens(client: Client) -> None:
    assert client.taken(CHAT, max_completion_tokens=5).generation.ending.max_tokens == 5
    assert client.taken(CHAT, max_completion_tokens=5, max_tokens=5).generation.n == 1
    client.refused(CHAT, max_completion_tokens=5, max_tokens=6)


def test_logprobs_of_chat(client: Client) -> None:
    assert client.taken(CHAT).generation.output.logprobs is None
    assert client.taken(CHAT, logprobs=False).generation.output.logprobs is None
    assert client.taken(CHAT, logprobs=True).generation.output.logprobs == 0
    assert client.taken(CHAT, logprobs=True, top_logprobs=3).generation.output.logprobs == 3
    client.refused(CHAT, top_logprobs=3)


def test_R57_response_formats(client: Client) -> None:
    def constraint(asked: Any) -> Constraint | None:
        return client.taken(CHAT, response_format=asked).generation.output.constraint

    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}}
    assert constraint({"type": "text"}) is None
    assert constraint({"type": "json_object"}) == Constraint("json_object")
    named = {"name": "f", "strict": True, "schema": schema}
    found = constraint({"type": "json_schema", "json_schema": named})
    assert found == Constraint("json_schema", json.dumps(schema))
    for param, bad in {
        "response_format.type": {"type": "xml"},
        "response_format.json_schema": {"type": "json_schema"},
        "response_format.json_schema.name": {"type": "json_schema", "json_schema": {}},
        "response_format.json_schema.schema": {
            "type": "json_schema",
            "json_schema": {"name": "f", "schema": "x"},
        },
    }.items():
        client.refused(CHAT, param, response_format=bad)
    forced = {"tools": [TOOL], "tool_choice": "required"}
    client.refused(CHAT, "tool_choice", response_format={"type": "json_object"}, **forced)


def test_R66_a_name_that_an_attacker_chose_is_not_repeated(client: Client) -> None:
    name = '<script>alert("x")</script>'
    error = client.refused(CHAT, "?", **{name: 1})
    assert name not in json.dumps(error)
    assert error["code"] == "unknown_parameter"
