"""One prompt's contribution to the metrics."""

from __future__ import annotations

import pytest

from mayfly_protocol.requests import FinishReason
from mayfly_protocol.serving import Delta, Usage
from mayfly_server.metrics import Metrics, PromptMetrics


class MeteredPrompt:
    """A prompt of the model ``m``, and a clock."""

    def __init__(self) -> None:
        self.now = 10.0
        self.metrics = Metrics()
        self.meter = PromptMetrics(self.metrics.of("m"), lambda: self.now)
        self.meter.arrived()

    def after(self, seconds: float) -> PromptMetrics:
        self.now += seconds
        return self.meter

    def tokens(self, count: int = 1, choice: int = 0, finish: FinishReason | None = None) -> None:
        self.meter.generated(Delta("r", 1, choice, 0, ids=(1,) * count, finish=finish))

    def value(self, name: str, **labels: str) -> float:
        found = self.metrics.registry.get_sample_value(f"mayfly_{name}", {"model": "m", **labels})
        assert found is not None, name
        return found

    @property
    def here(self) -> tuple[float, float]:
        """Waiting and running."""
        return self.value("num_requests_waiting"), self.value("num_requests_running")


def test_a_prompt_that_is_answered() -> None:
    prompt = MeteredPrompt()
    assert prompt.here == (1, 0)
    prompt.after(0.5).submitted()
    prompt.after(0.5).accepted(prompt_tokens=7)
    assert prompt.here == (1, 0)
    prompt.after(1.0).progressed()
    assert prompt.here == (0, 1)
    prompt.after(1.0)
    prompt.tokens()
    prompt.after(0.25)
    prompt.tokens(2, finish="stop")
    prompt.meter.ended(Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4))
    assert prompt.here == (0, 0)
    expected = {
        "request_queue_time_seconds_sum": 2.0,
        "time_to_first_token_seconds_sum": 3.0,
        "inter_token_latency_seconds_sum": 0.25,
        "inter_token_latency_seconds_count": 1,
        "e2e_request_latency_seconds_sum": 3.25,
        "prompt_tokens_total": 7,
        "prompt_tokens_cached_total": 4,
        "generation_tokens_total": 3,
        "request_attempts_total": 1,
        "interruption_seconds_count": 0,
    }
    for name, value in expected.items():
        assert prompt.value(name) == pytest.approx(value), name
    assert prompt.value("request_success_total", finished_reason="stop") == 1
    assert prompt.value("request_success_total", finished_reason="length") == 0


def test_one_that_nobody_waits_for_any_more() -> None:
    prompt = MeteredPrompt()
    prompt.meter.ended(None)
    prompt.meter.ended(None)
    assert prompt.here == (0, 0)
    assert prompt.value("e2e_request_latency_seconds_count") == 0


def test_one_that_never_arrived() -> None:
    metrics = Metrics()
    PromptMetrics(metrics.of("m")).ended(None)
    assert metrics.registry.get_sample_value("mayfly_num_requests_waiting", {"model": "m"}) == 0


def test_choices_have_their_own_pace() -> None:
    prompt = MeteredPrompt()
    prompt.tokens(choice=0)
    prompt.after(0.1)
    prompt.tokens(choice=1)
    prompt.after(0.2)
    prompt.tokens(choice=0)
    assert prompt.value("time_to_first_token_seconds_count") == 1
    assert prompt.value("inter_token_latency_seconds_sum") == pytest.approx(0.3)


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_a_continuation(phase: str) -> None:
    prompt = MeteredPrompt()
    prompt.meter.accepted(7)
    if phase != "queued":
        prompt.meter.progressed()
    if phase == "decode":
        prompt.tokens()
    prompt.meter.continued("lost")
    prompt.after(1.0).continued("metal_timeout")  # the next one was lost, too
    prompt.after(1.0).accepted(7)
    prompt.after(1.0).progressed()
    prompt.after(1.0)
    prompt.tokens()
    assert prompt.value("continuations_total", phase=phase, reason="lost") == 1
    assert prompt.value("continuations_total", phase=phase, reason="metal_timeout") == 1
    assert prompt.value("prompt_tokens_total") == 7
    # A stream is interrupted until its next token, what had none yet until it is worked on.
    assert prompt.value("interruption_seconds_count") == 1
    expected = 4.0 if phase == "decode" else 3.0
    assert prompt.value("interruption_seconds_sum") == pytest.approx(expected)


def test_a_retry_is_no_continuation() -> None:
    prompt = MeteredPrompt()
    prompt.meter.retried("full")
    assert prompt.value("request_retries_total", reason="full") == 1
    assert prompt.here == (1, 0)


def test_a_thousand_causes_are_one_time_series() -> None:
    """Texts from a worker or a client are never used as a label."""
    prompt = MeteredPrompt()
    for number in range(1000):
        prompt.meter.continued(f"cause {number}")
        prompt.meter.retried(f"kind-{number}")
        prompt.metrics.quarantined("m", f"kind-{number}")
    assert prompt.value("continuations_total", phase="queued", reason="other") == 1000
    assert prompt.value("request_retries_total", reason="other") == 1000
    assert prompt.value("quarantined_total", kind="other") == 1000
