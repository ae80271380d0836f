"""Classification of a worker's end: the error that decides among several, signals and exit
codes."""

from __future__ import annotations

import signal
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mayfly_protocol.faults import KINDS, classify_exception, classify_exit, classify_text
from mayfly_protocol.lifecycle import Exit

METAL = "[METAL] Command buffer execution failed: "
TIMEOUT = METAL + "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)."
IGNORED = (
    METAL + "Ignored (for causing prior/excessive GPU errors) "
    "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)."
)
THRASH = (
    "Cache thrashing is happening, please set the environment variable "
    "MLX_CUDA_GRAPH_CACHE_SIZE to a larger value than 2 to fix degraded performance."
)
POISON = "cudaGraphAddDependencies(graph_, a, b, n) failed: invalid argument"
CAPTURE = "cudaStreamEndCapture(stream, &graph) failed: operation not permitted"
OUT_OF_MEMORY = "cudaMallocAsync(&data, size, stream) failed: out of memory"
SHAPE = "[broadcast_shapes] Shapes (2,3) and (4) cannot be broadcast."
NO_FILE = "[load_safetensors] Failed to open file /models/m/model.safetensors"
TERMINATE = "terminate called after throwing an instance of 'std::runtime_error'\n  what():  "
LIBCXX = "libc++abi: terminating due to uncaught exception of type std::runtime_error: "


def chained(*texts: str) -> BaseException:
    """Errors of which each was raised while the one before it was handled."""
    try:
        raise RuntimeError(texts[-1])
    except RuntimeError as last:
        if len(texts) > 1:
            last.__context__ = chained(*texts[:-1])
        return last


class TestText:
    def test_of_overlapping_signatures_the_first_of_the_table_counts(self) -> None:
        text = "cudaGraphLaunch(exec, stream) failed: an illegal memory access was encountered"
        assert classify_text(text).kind == "cuda_sticky"
        assert classify_text("cudaGraphLaunch(exec, stream) failed: ?").kind == "cuda_graph_launch"
        assert classify_text("cudaFoo(exec, stream) failed: ?").kind == "cuda_other"

    def test_of_several_lines_the_first_counts(self) -> None:
        assert classify_text(f"{TIMEOUT}\n{IGNORED}").kind == "metal_timeout"
        assert classify_text(f"{IGNORED}\n{TIMEOUT}").kind == "metal_submissions_ignored"

    def test_of_several_errors_in_one_line_the_first_counts(self) -> None:
        assert classify_text(f"first: {TIMEOUT} later: {IGNORED}").kind == "metal_timeout"
        assert classify_text(f"{THRASH} {POISON} {OUT_OF_MEMORY}").kind == "cuda_graph_thrash"
        assert classify_text(f"cudaFoo(x) failed: bad; {OUT_OF_MEMORY}").kind == "cuda_other"

    @pytest.mark.parametrize("text", [TIMEOUT, SHAPE, NO_FILE, OUT_OF_MEMORY])
    def test_what_an_uncaught_exception_says_goes_before_that_it_was_uncaught(
        self, text: str
    ) -> None:
        kind = classify_text(text).kind
        assert classify_text(LIBCXX + text).kind == kind
        assert classify_text(TERMINATE + text + "\nFatal Python error: Aborted").kind == kind

    def test_an_uncaught_exception_that_says_nothing_is_still_more_than_an_abort(self) -> None:
        assert classify_text(TERMINATE + "?\nFatal Python error: Aborted").kind == "cxx_abort"


class TestException:
    def test_the_earliest_decides_whatever_cleanup_raises(self) -> None:
        assert classify_exception(chained(TIMEOUT, IGNORED, SHAPE)).kind == "metal_timeout"
        assert classify_exception(chained(THRASH, *[POISON] * 99)).kind == "cuda_graph_thrash"

    def test_a_cause_is_followed_as_a_context_is(self) -> None:
        error = RuntimeError("the engine failed")
        error.__cause__ = RuntimeError(OUT_OF_MEMORY)
        verdict = classify_exception(error)
        assert (verdict.kind, verdict.scope) == ("cuda_out_of_memory", "batch")
        assert verdict.signature == OUT_OF_MEMORY

    def test_a_suppressed_context_counts(self) -> None:
        try:
            try:
                raise RuntimeError(TIMEOUT)
            except RuntimeError:
                raise ValueError(SHAPE) from None
        except ValueError as error:
            assert classify_exception(error).kind == "metal_timeout"

    def test_what_says_nothing_hides_nothing(self) -> None:
        assert classify_exception(chained("'key'", TIMEOUT)).kind == "metal_timeout"
        assert classify_exception(chained("'key'", LIBCXX, TIMEOUT)).kind == "metal_timeout"
        assert classify_exception(chained("'key'", LIBCXX + "?")).kind == "cxx_abort"

    def test_an_aside_of_pythons_costs_nothing(self) -> None:
        error = RuntimeError(OUT_OF_MEMORY)
        error.__context__ = KeyError("key")
        assert classify_exception(error).scope == "batch"

    @pytest.mark.parametrize("unnamed", [RuntimeError("?"), ValueError("?"), MemoryError()])
    def test_an_unnamed_error_of_the_engine_is_not_outweighed_by_what_followed(
        self, unnamed: Exception
    ) -> None:
        error = RuntimeError(SHAPE)
        error.__context__ = unnamed
        verdict = classify_exception(error)
        assert (verdict.kind, verdict.scope) == ("shape", "worker")

    def test_an_unnamed_error_costs_the_worker(self) -> None:
        verdict = classify_exception(chained("one", "two"))
        assert (verdict.kind, verdict.scope, verdict.blame) == ("unknown", "worker", "suspects")

    def test_members_of_a_group_come_before_what_was_raised_about_them(self) -> None:
        group = ExceptionGroup("tasks", [ValueError("?"), chained(TIMEOUT, SHAPE)])  # type: ignore[list-item]
        error = RuntimeError(IGNORED)
        error.__cause__ = group
        assert classify_exception(error).kind == "metal_timeout"

    def test_logits_that_mean_nothing(self) -> None:
        from mayfly_worker.engine.decode import NonFiniteLogits

        assert classify_exception(NonFiniteLogits([4])).kind == "nonfinite_logits"

    def test_an_exception_without_a_usable_text_is_unknown(self) -> None:
        class Broken(Exception):
            def __str__(self) -> str:
                raise ValueError(TIMEOUT)

        assert classify_exception(Broken()).kind == "unknown"


class TestSignals:
    @pytest.mark.parametrize(
        "number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGTRAP]
    )
    def test_a_crash_is_a_crash_whatever_stderr_says(self, number: signal.Signals) -> None:
        verdict = classify_exit(-number, TIMEOUT)
        assert (verdict.kind, verdict.scope, verdict.blame) == ("crashed", "worker", "suspects")
        assert verdict.signature == number.name

    def test_sigkill_from_outside_is_somebodys_hand(self) -> None:
        verdict = classify_exit(-signal.SIGKILL, TIMEOUT)
        assert (verdict.kind, verdict.scope, verdict.blame) == ("killed", "worker", "none")

    def test_sigkill_under_memory_pressure_is_the_systems(self) -> None:
        verdict = classify_exit(-signal.SIGKILL, "", memory_pressure=True)
        assert (verdict.kind, verdict.scope) == ("killed_by_system", "machine")

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGUSR2])
    def test_a_signal_of_ours_means_that_it_would_not_leave(self, number: int) -> None:
        verdict = classify_exit(-number, "", sent_by_us=True, memory_pressure=True)
        assert verdict.kind == "wedged"

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    def test_other_signals_are_a_hand_too_but_never_the_system(self, number: int) -> None:
        assert classify_exit(-number, "", memory_pressure=True).kind == "killed"

    @pytest.mark.parametrize("number", [signal.SIGXCPU, 64])
    def test_a_signal_with_no_meaning_here_is_unknown(self, number: int) -> None:
        assert classify_exit(-number, "", sent_by_us=True).kind == "unknown"


class TestAbort:
    def test_an_abort_that_says_nothing(self) -> None:
        verdict = classify_exit(-signal.SIGABRT, "Fatal Python error: Aborted\n")
        assert (verdict.kind, verdict.signature) == ("aborted", "SIGABRT")
        assert classify_exit(-signal.SIGABRT, "").kind == "aborted"

    def test_an_uncaught_exception_that_names_nothing(self) -> None:
        assert classify_exit(-signal.SIGABRT, TERMINATE + "?").kind == "cxx_abort"

    @pytest.mark.parametrize("how", [TERMINATE, LIBCXX])
    def test_an_uncaught_exception_is_what_it_says(self, how: str) -> None:
        assert classify_exit(-signal.SIGABRT, how + TIMEOUT).kind == "metal_timeout"

    def test_it_goes_before_errors_above_it(self) -> None:
        stderr = (
            f"WARNING batch rebuilt: {OUT_OF_MEMORY}\nRuntimeError: {THRASH}\n{LIBCXX}{TIMEOUT}"
        )
        assert classify_exit(-signal.SIGABRT, stderr).kind == "metal_timeout"

    @pytest.mark.parametrize("first", [THRASH, OUT_OF_MEMORY])
    @pytest.mark.parametrize("follower", [POISON, CAPTURE, IGNORED])
    def test_unless_it_only_followed_from_them(self, first: str, follower: str) -> None:
        stderr = f"RuntimeError: {first}\n\nDuring handling ...\n{TERMINATE}{follower}\n"
        assert classify_exit(-signal.SIGABRT, stderr).kind == classify_text(first).kind
        assert classify_exit(-signal.SIGABRT, TERMINATE + follower).kind == (
            classify_text(follower).kind
        )

    def test_an_assertion_goes_before_a_fault_that_was_survived(self) -> None:
        stderr = (
            f"WARNING batch rebuilt: {SHAPE}\n-[AGX commit]:1091: failed assertion "
            "`A command encoder is already encoding to this command buffer'\n"
        )
        assert classify_exit(-signal.SIGABRT, stderr).kind == "metal_assert"

    def test_a_dead_process_has_lost_more_than_a_batch(self) -> None:
        verdict = classify_exit(-signal.SIGABRT, TERMINATE + OUT_OF_MEMORY)
        assert (verdict.kind, verdict.scope) == ("cuda_out_of_memory", "worker")


class TestExitCodes:
    @pytest.mark.parametrize(
        ("code", "kind", "scope"),
        [
            (Exit.BYE, "left", "worker"),
            (Exit.CONFIGURATION, "configuration", "model"),
            (Exit.LOAD_FAILED, "load_failed", "worker"),
            (Exit.POISONED, "unknown", "worker"),
            (Exit.ORPHANED, "orphaned", "worker"),
            (Exit.RECYCLED, "recycled", "recycle"),
            (1, "unknown", "worker"),
            (2, "unknown", "worker"),
            (255, "unknown", "worker"),
        ],
    )
    def test_codes_by_themselves(self, code: int, kind: str, scope: str) -> None:
        verdict = classify_exit(code, "Traceback (most recent call last):\nValueError: ?\n")
        assert (verdict.kind, verdict.scope) == (kind, scope)

    @pytest.mark.parametrize("code", [Exit.BYE, Exit.ORPHANED, Exit.RECYCLED])
    def test_a_good_end_is_not_overruled_by_an_old_error(self, code: int) -> None:
        assert classify_exit(code, TIMEOUT).kind == classify_exit(code, "").kind

    @pytest.mark.parametrize("code", [1, Exit.POISONED])
    def test_an_error_that_was_not_reported_is_read_from_stderr(self, code: int) -> None:
        stderr = f"Traceback:\nRuntimeError: {TIMEOUT}\nTraceback:\nRuntimeError: {IGNORED}\n"
        assert classify_exit(code, stderr).kind == "metal_timeout"

    def test_the_watchdog(self) -> None:
        stderr = "Timeout (0:01:30)!\nThread 0x00007f01 (most recent call first):\n  File ..."
        verdict = classify_exit(1, stderr)
        assert (verdict.kind, verdict.signature) == ("wedged", "Timeout (0:01:30)!")
        assert classify_exit(0, stderr).kind == "left"

    def test_a_failed_load_says_whether_it_would_fail_again(self) -> None:
        verdict = classify_exit(Exit.LOAD_FAILED, f"RuntimeError: {NO_FILE}\n")
        assert (verdict.kind, verdict.scope) == ("model_load", "model")
        verdict = classify_exit(Exit.LOAD_FAILED, f"RuntimeError: {OUT_OF_MEMORY}\n")
        assert (verdict.kind, verdict.scope) == ("cuda_out_of_memory", "worker")

    def test_a_configuration_that_cannot_work_keeps_its_scope(self) -> None:
        assert classify_exit(Exit.CONFIGURATION, NO_FILE).kind == "model_load"
        assert classify_exit(Exit.CONFIGURATION, TIMEOUT).kind == "configuration"


PIECES = [TIMEOUT, IGNORED, OUT_OF_MEMORY, CAPTURE, LIBCXX, TERMINATE, SHAPE, "Timeout (0:00:01)!"]
texts = st.lists(st.sampled_from([*PIECES, "\n", " ", "cuda", "("]) | st.text(max_size=20)).map(
    "".join
)


@given(text=texts, status=st.integers(-70, 260), ours=st.booleans(), pressure=st.booleans())
def test_any_text_and_any_end_has_a_kind(
    text: str, status: int, ours: bool, pressure: bool
) -> None:
    for verdict in (
        classify_text(text),
        classify_exception(chained(text, text[::-1])),
        classify_exit(status, text, sent_by_us=ours, memory_pressure=pressure),
    ):
        assert verdict.kind in KINDS
        assert verdict.blame == KINDS[verdict.kind].blame


@given(text=texts, end=st.sampled_from([-signal.SIGABRT, 1, Exit.POISONED, Exit.LOAD_FAILED]))
def test_no_dead_process_was_survived(text: str, end: int) -> None:
    assert classify_exit(end, text).scope in {"worker", "machine", "model"}


@pytest.mark.parametrize(
    "piece",
    [
        "2026-01-01 12:00:00 INFO nothing happened in this line of a log\n",
        "\n",
        "cuA(",
        "cudaGraphLaunch(",
        "cublas(failed ",
        "nvrtcA(",
        "cuX() failed: ",
        " failed: ",
        METAL,
        TIMEOUT,
        "Failed to load compiled ",
        "terminate called ",
    ],
)
def test_a_megabyte_is_classified_quickly(piece: str) -> None:
    """Ten times the text may take some ten times as long, never a hundred: of some tries, for on a
    busy machine a thread's own time is not its own alone."""

    def seconds(length: int) -> float:
        text = (piece * (length // len(piece) + 1))[:length]
        start = time.thread_time()
        classify_text(text)
        return time.thread_time() - start

    short = min(seconds(100_000) for _ in range(2))
    assert any(seconds(1_000_000) < 30 * short + 0.1 for _ in range(3))
