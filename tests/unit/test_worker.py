"""A real worker process: its messages to its reaper and to front ends, and its exits."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mayfly_protocol.lifecycle import Beat, Bye, Drain, Exit, Fault, Hello, Loading
from mayfly_protocol.requests import ChatPrompt, TextPrompt, TokenPrompt
from mayfly_protocol.serving import (
    Accepted,
    Cancel,
    Detokenize,
    Detokenized,
    Finish,
    Handover,
    Inquiry,
    Ping,
    Pong,
    Rejected,
    Tokenize,
    Tokenized,
)
from support.models.scripted import ModelFault, ScriptedReply
from support.worker import AttemptAnswer, WorkerProcess, generation

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def shared(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    folder = tmp_path_factory.mktemp("worker")
    with WorkerProcess(tiny_model, folder, beat_interval_s=0.1) as worker:
        worker.wait_ready()
        yield worker


def chat(text: str) -> ChatPrompt:
    return ChatPrompt(({"role": "user", "content": text},))


def test_it_says_hello_loads_and_is_ready(shared: WorkerProcess) -> None:
    kinds = [type(m) for m in shared.received]
    assert kinds[0] is Hello
    assert kinds.count(Hello) == 1
    phases = [m.phase for m in shared.received_of(Loading)]
    assert phases == sorted(phases, key=["warming", "loading", "canary"].index)
    last = [m for m in shared.received_of(Loading) if m.phase == "loading"][-1]
    assert last.done == last.total > 0


def test_an_answer_from_first_to_last_message(shared: WorkerProcess) -> None:
    answer = shared.ask(generation(max_tokens=8))
    assert isinstance(answer.messages[0], Accepted)
    assert [d.index for d in answer.deltas] == list(range(8))
    assert answer.finish() == "length"
    end = answer.end
    assert isinstance(end, Finish)
    assert end.reason == "done"
    assert end.usage.prompt_tokens == answer.messages[0].prompt_tokens
    assert end.usage.completion_tokens == 8


def test_eight_run_as_one_batch_and_each_equals_its_solo_answer(shared: WorkerProcess) -> None:
    prompts = [f"Story number {i} begins" for i in range(8)]
    alone = [shared.ask(generation(p, max_tokens=200)).ids() for p in prompts]
    seen = len(shared.received)
    # Long enough for a beat to come meanwhile, however late it is.
    answers = [shared.submit(generation(p, max_tokens=1500)) for p in prompts]

    def running() -> int:
        return max((m.running for m in shared.received[seen:] if isinstance(m, Beat)), default=0)

    shared.wait(
        lambda: running() == 8 and all(len(a.ids()) >= 200 for a in answers), "eight that run"
    )
    for answer in answers:
        shared.send(Cancel(answer.rid, 1))
    shared.wait(lambda: all(a.end for a in answers), "eight ends")
    assert [a.ids()[:200] for a in answers] == alone
    assert running() == 8


def test_a_continuation_repeats_nothing_and_misses_nothing(shared: WorkerProcess) -> None:
    wanted = generation(max_tokens=20, temperature=0.9, seed=5, n=2)
    whole = shared.ask(wanted)
    resume = (tuple(whole.ids(0)[:7]), tuple(whole.ids(1)[:13]))
    rest = shared.ask(wanted, attempt=2, resume=resume)
    for choice in (0, 1):
        assert rest.ids(choice) == whole.ids(choice)[len(resume[choice]) :]
        assert whole.text(choice).endswith(rest.text(choice))
    assert isinstance(rest.end, Finish)
    assert isinstance(whole.end, Finish)
    assert rest.end.usage.completion_tokens == whole.end.usage.completion_tokens
    ended = shared.ask(wanted, attempt=3, resume=resume, finished=(0,))
    assert ended.ids(0) == []
    assert ended.ids(1) == whole.ids(1)[13:]
    full = shared.ask(wanted, attempt=4, resume=(tuple(whole.ids(0)), resume[1]))
    assert full.ids(0) == []
    assert full.finish(0) == "length"


def test_cached_tokens_are_those_of_the_prompt_counted_once(shared: WorkerProcess) -> None:
    wanted = generation("A beginning that is new. " * 20, max_tokens=20, n=3)

    def cached(answer: AttemptAnswer) -> int:
        assert isinstance(answer.end, Finish)
        assert answer.end.usage.prompt_tokens > 60
        return answer.end.usage.cached_tokens - answer.end.usage.prompt_tokens

    first = shared.ask(wanted)
    assert isinstance(first.end, Finish)
    assert first.end.usage.cached_tokens == 0
    assert cached(shared.ask(wanted)) == -1
    # Continued choices start one by one, and find their answers' beginnings too.
    resume = tuple(tuple(first.ids(choice)[:15]) for choice in range(3))
    assert cached(shared.ask(wanted, attempt=2, resume=resume)) == 0


def test_cancel_is_answered_and_frees_the_row(shared: WorkerProcess) -> None:
    answer = shared.submit(generation(max_tokens=1500, ignore_eos=True, n=8))  # takes some seconds
    shared.wait(lambda: len(answer.ids()) > 3, "tokens")
    shared.send(Cancel(answer.rid, 1))
    shared.wait(lambda: answer.end, "the end")
    assert isinstance(answer.end, Finish)
    assert answer.end.reason == "cancelled"
    before = len(shared.received)
    shared.wait(
        lambda: [m for m in shared.received[before:] if isinstance(m, Beat) and m.phase == "idle"],
        "an idle engine",
    )


def test_what_cannot_run_is_refused_by_name(shared: WorkerProcess) -> None:
    refusals = [
        (generation(TokenPrompt((10**6,))), "prompt"),
        (generation(TokenPrompt(())), "prompt"),
        (generation(logit_bias=((10**6, 1.0),)), "logit_bias"),
        (generation("word " * 5000), None),
    ]
    for wanted, param in refusals:
        answer = shared.ask(wanted)
        assert isinstance(answer.end, Rejected)
        assert answer.end.reason == "invalid"
        assert param is None or answer.end.param == param
    assert isinstance(shared.ask(generation()).end, Finish)


def reply(worker: WorkerProcess, inquiry: Inquiry) -> Any:
    """The only message about a question."""
    answer = worker.answers[inquiry.rid, inquiry.attempt] = AttemptAnswer(inquiry.rid)
    worker.send(inquiry)
    [found] = worker.wait(lambda: answer.messages, "an answer")
    return found


def test_prompts_are_tokenized_and_back(shared: WorkerProcess) -> None:
    text = "Once upon a time, naïve 😀"
    tokenized = reply(shared, Tokenize("t1", 1, TextPrompt(text)))
    assert tokenized.count == len(tokenized.ids) > 3
    assert reply(shared, Detokenize("t2", 1, tokenized.ids)) == Detokenized("t2", 1, text)
    counted = reply(shared, Tokenize("t3", 1, TextPrompt(text), count_only=True))
    assert counted == Tokenized("t3", 1, tokenized.count)
    chatted = reply(shared, Tokenize("t4", 1, chat("hi")))
    assert reply(shared, Detokenize("t5", 1, chatted.ids)).text == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    finish = shared.ask(generation(TokenPrompt(tokenized.ids))).end
    assert isinstance(finish, Finish)
    assert finish.usage.prompt_tokens == tokenized.count


@pytest.mark.parametrize(
    ("inquiry", "param"),
    [
        (Tokenize("q1", 1, TextPrompt("")), "prompt"),
        (Tokenize("q2", 1, TextPrompt(""), special=False), "prompt"),
        (Tokenize("q3", 1, ChatPrompt(({"role": "dog", "content": "wuff"},))), "messages"),
        (Detokenize("q4", 1, (10**6,)), "tokens"),
        (Detokenize("q5", 1, (-1,)), "tokens"),
    ],
)
def test_questions_without_an_answer(shared: WorkerProcess, inquiry: Inquiry, param: str) -> None:
    found = reply(shared, inquiry)
    assert isinstance(found, Rejected)
    assert (found.reason, found.param) == ("invalid", param)


def test_ping_is_answered(shared: WorkerProcess) -> None:
    from mayfly_protocol import codec

    shared.send(Ping(17))
    said = iter(lambda: codec.to_front_end.decode(shared.front.recv()), None)
    assert next(message for message in said if isinstance(message, Pong)) == Pong(17)


def test_nonsense_on_the_socket_changes_nothing(shared: WorkerProcess) -> None:
    for frames in ([b""], [b"\xc1"], [os.urandom(1000)], [b"a", b"b"], [b"\x80\x04K\x01."]):
        shared.front.send_multipart(frames)
    assert isinstance(shared.ask(generation()).end, Finish)


def test_a_front_end_that_vanishes_is_forgotten(tiny_model: Path, tmp_path: Path) -> None:
    with WorkerProcess(tiny_model, tmp_path) as worker:
        worker.wait_ready()
        answer = worker.submit(generation(max_tokens=2000, ignore_eos=True))
        worker.wait(lambda: answer.ids(), "tokens")
        worker.front.close()
        worker.front = worker.front_end()
        seen = len(worker.received)
        worker.wait(
            lambda: [m for m in worker.received[seen:] if isinstance(m, Beat) and m.running == 0],
            "the worker to notice",
        )


def test_drain_finishes_what_runs_then_leaves(
    scripted_model: Callable[..., Path], tmp_path: Path
) -> None:
    wait = ModelFault(3, "wait", "middle")
    model = scripted_model([ScriptedReply("go", "one two three four five six", faults=[wait])])
    with WorkerProcess(model, tmp_path, trust_remote_code=True) as worker:
        worker.wait_ready()
        answer = worker.submit(generation(chat("go"), max_tokens=50, split=True))
        worker.wait(lambda: answer.ids(), "tokens")
        worker.send_as_reaper(Drain(30.0))
        worker.wait(
            lambda: [b for b in worker.received_of(Beat) if b.phase == "stopping"], "draining"
        )
        late = worker.submit(generation(chat("go")))
        worker.wait(lambda: late.end, "a refusal")
        assert answer.end is None
        (model / "middle.go").touch()
        worker.wait(lambda: answer.end, "the end of what ran")
        assert isinstance(late.end, Rejected)
        assert late.end.reason == "leaving"
        assert answer.text() == "one two three four five six"
        assert worker.wait_exit() == Exit.RECYCLED
        worker.wait(lambda: worker.received_of(Bye), "Bye")


def test_drain_hands_over_at_the_end_of_its_grace(
    scripted_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = scripted_model([ScriptedReply("go", "word " * 500)], step_s=0.02)
    with WorkerProcess(model, tmp_path, trust_remote_code=True) as worker:
        worker.wait_ready()
        answer = worker.submit(generation(chat("go"), max_tokens=500))
        worker.wait(lambda: answer.ids(), "tokens")
        worker.send_as_reaper(Drain(0.2))
        worker.wait(lambda: answer.end, "the handover")
        assert isinstance(answer.end, Handover)
        assert answer.end.cause == "drain"
        assert worker.wait_exit() == Exit.RECYCLED


@pytest.mark.parametrize("how", ["sigterm", "stdin"])
def test_it_leaves_when_told_or_orphaned(tiny_model: Path, tmp_path: Path, how: str) -> None:
    with WorkerProcess(tiny_model, tmp_path, orphan_grace_s=0.2) as worker:
        worker.wait_ready()
        answer = worker.submit(generation(max_tokens=2000, ignore_eos=True, n=8))
        worker.wait(lambda: answer.ids(), "tokens")
        if how == "sigterm":
            worker.process.send_signal(signal.SIGTERM)
        else:
            assert worker.process.stdin is not None
            worker.process.stdin.close()
        worker.wait(lambda: answer.end, "the handover")
        assert isinstance(answer.end, Handover)
        assert worker.wait_exit() == (Exit.BYE if how == "sigterm" else Exit.ORPHANED)


def test_a_folder_that_cannot_be_served_is_a_configuration_error(
    scripted_model: Callable[..., Path], tmp_path: Path
) -> None:
    with WorkerProcess(scripted_model([ScriptedReply("x", "y")]), tmp_path) as worker:
        assert worker.wait_exit() == Exit.CONFIGURATION
        worker.wait(lambda: worker.received_of(Fault), "Fault")
        [fault] = worker.received_of(Fault)
        assert fault.scope == "model"
        assert "--trust-remote-code" in fault.first.text


def test_a_worker_that_is_worn_out_leaves_as_one_that_is_recycled(
    scripted_model: Callable[..., Path], tmp_path: Path
) -> None:
    text = "[metal::malloc] Resource limit (499000) exceeded."
    model = scripted_model(
        [ScriptedReply("last", "one two three", faults=[ModelFault(2, "raise", text)])]
    )
    with WorkerProcess(model, tmp_path, trust_remote_code=True) as worker:
        worker.wait_ready()
        answer = worker.ask(generation(chat("last"), max_tokens=50))
        assert isinstance(answer.end, Handover)
        assert worker.wait_exit() == Exit.RECYCLED
        worker.wait(lambda: worker.received_of(Bye), "Bye")
        [fault], [bye] = worker.received_of(Fault), worker.received_of(Bye)
        assert (fault.kind, fault.scope) == ("metal_resource_limit", "recycle")
        assert bye.code == Exit.RECYCLED


def test_a_fault_of_worker_scope_hands_over_and_ends_the_process(
    scripted_model: Callable[..., Path], tmp_path: Path
) -> None:
    text = "[METAL] Command buffer execution failed: Caused GPU Timeout Error (ErrorTimeout)"
    model = scripted_model(
        [
            ScriptedReply("bad", "one two three", faults=[ModelFault(2, "raise", text)]),
            ScriptedReply("good", "fine"),
        ]
    )
    with WorkerProcess(model, tmp_path, trust_remote_code=True) as worker:
        worker.wait_ready()
        answer = worker.ask(generation(chat("bad"), max_tokens=50))
        assert isinstance(answer.end, Handover)
        assert answer.end.cause == "metal_timeout"
        assert worker.wait_exit() == Exit.POISONED
        worker.wait(lambda: worker.received_of(Fault), "Fault")
        [fault] = worker.received_of(Fault)
        assert (fault.kind, fault.scope, fault.first.text) == ("metal_timeout", "worker", text)
        assert fault.requests == fault.suspects == (answer.messages[0].rid,)


def test_a_fault_of_batch_scope_hands_over_and_serves_on(
    scripted_model: Callable[..., Path], tmp_path: Path
) -> None:
    text = "[broadcast_shapes] Shapes (1,2) and (3,4) cannot be broadcast."
    model = scripted_model(
        [
            ScriptedReply("bad", "one two", faults=[ModelFault(1, "raise", text)]),
            ScriptedReply("good", "all is well"),
        ]
    )
    with WorkerProcess(model, tmp_path, trust_remote_code=True) as worker:
        worker.wait_ready()
        answer = worker.ask(generation(chat("bad"), max_tokens=50))
        assert isinstance(answer.end, Handover)
        assert answer.end.cause == "shape"
        good = worker.ask(generation(chat("good"), max_tokens=50, split=True))
        assert good.text() == "all is well"
        assert worker.process.poll() is None


def test_an_idle_worker_uses_no_cpu(shared: WorkerProcess) -> None:
    import psutil

    shared.ask(generation())
    process = psutil.Process(shared.process.pid)
    before = process.cpu_times()
    begin = time.monotonic()
    while time.monotonic() - begin < 2.0:
        shared.listen(0.5)
    after = process.cpu_times()
    assert (after.user + after.system) - (before.user + before.system) < 0.4
