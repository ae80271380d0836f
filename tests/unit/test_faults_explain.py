"""``mayfly faults explain``: from a log to a fault and its meaning."""

from __future__ import annotations

import io
import json
import sys

import pytest
from typer.testing import CliRunner

from mayfly_cli.app import app
from mayfly_protocol.faults import explain
from mayfly_protocol.faults.explain import CHUNK, find_faults

explain_module = sys.modules["mayfly_protocol.faults.explain"]  # the name is the function's

METAL = "[METAL] Command buffer execution failed: "
TIMEOUT = METAL + "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)."
IGNORED = METAL + "Ignored (00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)."
OUT_OF_MEMORY = "cudaMallocAsync(&data, size, stream) failed: out of memory"
LOG = f"""\
INFO serving tiny on 127.0.0.1:8000
Traceback (most recent call last):
  File "engine.py", line 88, in step
    mx.eval(tokens)
RuntimeError: {TIMEOUT}

During handling of the above exception, another exception occurred:

RuntimeError: {IGNORED}
RuntimeError: {IGNORED}
libc++abi: terminating due to uncaught exception of type std::runtime_error: {IGNORED}
Fatal Python error: Aborted
"""


def seen(log: str) -> list[tuple[str, int]]:
    return [(each.kind.name, each.line) for each in find_faults(io.StringIO(log))]


class TestSightings:
    def test_each_line_that_names_a_fault(self) -> None:
        assert seen(LOG) == [
            ("metal_timeout", 5),
            ("metal_submissions_ignored", 9),
            ("metal_submissions_ignored", 10),
            ("metal_submissions_ignored", 11),
            ("aborted", 12),
        ]

    def test_an_uncaught_exception_and_what_it_says_are_one(self) -> None:
        said = f"terminate called after throwing an instance of 'X'\n  what():  {OUT_OF_MEMORY}\n"
        assert seen(said) == [("cuda_out_of_memory", 2)]

    def test_but_not_what_comes_much_later(self) -> None:
        log = "terminate called without an active exception\n" + "\n" * 20 + OUT_OF_MEMORY
        assert seen(log) == [("cxx_abort", 1), ("cuda_out_of_memory", 22)]
        assert seen("terminate called\nFatal Python error: Aborted\n") == [
            ("cxx_abort", 1),
            ("aborted", 2),
        ]
        assert seen("terminate called\nterminate called\n") == [("cxx_abort", 1), ("cxx_abort", 2)]

    @pytest.mark.parametrize("newline", ["\n", ""])
    @pytest.mark.parametrize("before", [0, 1, 700])
    def test_a_fault_on_the_edge_of_a_chunk_is_found_once(
        self, before: int, newline: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        size = 2500  # hardly more than the overlap
        monkeypatch.setattr(explain_module, "CHUNK", size)
        edges = [size, 2 * size, 3 * size - before]
        for at in (e + offset for e in edges for offset in range(-len(TIMEOUT) - 2, 3)):
            filler = "." * (at - before - len(newline)) + newline
            log = "\n" * before + filler + TIMEOUT + newline + "." * size
            assert seen(log) == [("metal_timeout", before + 1 + len(newline))]

    def test_a_line_longer_than_a_chunk_is_one_line(self) -> None:
        dots = "." * CHUNK * 3
        log = f"{dots}{TIMEOUT}{dots}{IGNORED}{dots}\n{OUT_OF_MEMORY}"
        assert seen(log) == [("metal_timeout", 1), ("cuda_out_of_memory", 2)]

    def test_it_never_holds_more_than_a_few_chunks(self) -> None:
        class EndlessLog(io.StringIO):
            """Gives out one long line and notes how much is asked for at a time."""

            left = 12 * CHUNK
            asked: list[int | None] = []  # noqa: RUF012

            def read(self, size: int | None = -1, /) -> str:
                self.asked.append(size)
                assert size is not None
                given = min(size, self.left)
                self.left -= given
                return "x" * given

        log = EndlessLog()
        assert list(find_faults(log)) == []
        assert len(log.asked) == 13
        assert set(log.asked) == {CHUNK}


class TestExplanation:
    def test_the_first_and_a_count_of_the_later(self) -> None:
        explanation = explain(io.StringIO(LOG))
        assert explanation is not None
        assert explanation.first.kind.name == "metal_timeout"
        assert explanation.first.excerpt == TIMEOUT
        assert [(each.kind.name, each.line, each.count) for each in explanation.later] == [
            ("metal_submissions_ignored", 9, 3),
            ("aborted", 12, 1),
        ]

    def test_nothing_known(self) -> None:
        assert explain(io.StringIO("all is well\n" * 1000)) is None

    def test_the_excerpt_steers_no_terminal(self) -> None:
        explanation = explain(io.StringIO(f"{TIMEOUT}\x1b[2J\x07 and more"))
        assert explanation is not None
        assert explanation.first.excerpt == f"{TIMEOUT}�[2J� and more"


class TestCommand:
    def test_it_says_what_happened_and_what_to_do(self) -> None:
        result = CliRunner().invoke(app, ["faults", "explain"], input=LOG)
        assert result.exit_code == 0
        assert result.output.startswith("metal_timeout (scope: worker), in line 5:")
        words = " ".join(result.output.split())
        for expected in (
            "What happened The GPU watchdog",
            "What Mayfly does The worker leaves",
            "What you can do Close other programs",
            "What came later metal_submissions_ignored (scope: worker) in line 9, 3 times in all",
            "aborted (scope: worker) in line 12",
        ):
            assert expected in words

    def test_json(self) -> None:
        result = CliRunner().invoke(app, ["faults", "explain", "--json"], input=LOG)
        assert result.exit_code == 0
        answer = json.loads(result.output)
        assert {key: answer[key] for key in ("kind", "scope", "strike", "line", "text")} == {
            "kind": "metal_timeout",
            "scope": "worker",
            "strike": "suspects",
            "line": 5,
            "text": TIMEOUT,
        }
        assert answer["meaning"] and answer["reaction"] and answer["advice"]
        assert answer["later"][0] == {
            "kind": "metal_submissions_ignored",
            "scope": "worker",
            "line": 9,
            "count": 3,
        }

    @pytest.mark.parametrize("options", [[], ["--json"]])
    @pytest.mark.parametrize("log", ["", "all is well\n", "KeyError: 'x'\n"])
    def test_it_fails_where_it_recognises_nothing(self, log: str, options: list[str]) -> None:
        result = CliRunner().invoke(app, ["faults", "explain", *options], input=log)
        assert result.exit_code == 1
        assert result.stdout == ""
        assert "no line of this is a fault" in result.stderr

    def test_bytes_that_are_no_text_do_no_harm(self) -> None:
        log = b"\xff\x00\xfe\r\n" + OUT_OF_MEMORY.encode() + b"\xc3\n"
        result = CliRunner().invoke(app, ["faults", "explain"], input=log)
        assert result.exit_code == 0
        assert result.output.startswith("cuda_out_of_memory (scope: batch), in line 2:")
