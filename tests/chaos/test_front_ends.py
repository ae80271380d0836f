"""A front end that is killed takes its own clients' connections with it, and nothing else."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import openai
import psutil

from chaos_client import Asking
from mayfly_server.cli.control import ask
from models.scripted import Play
from server_harness import Server, another_front_end, serving, wait_for

TALE = " ".join(f"word{number}" for number in range(30))
ENDLESS = "and on " * 1500
EACH = 3
SOON_S = 10.0


def front_end(server: Server) -> psutil.Process:
    """The one that this server's reaper looks after."""
    found = [p for p in server.processes() if "mayfly_server.front" in p.cmdline()]
    return found[-1]


def running(server: Server) -> int:
    """Requests that a node's workers have; asked of the node, and of no front end."""
    return sum(slot.running + slot.waiting for slot in ask(server.state_dir).slots)


def test_a_killed_front_end_leaves_all_others_untouched(
    scripted_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Two nodes with a front end each, and a third front end that knows both nodes."""
    model = scripted_model([Play("[tale]", TALE), Play("[endless]", ENDLESS)], step_s=0.02)
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    with (
        serving(model, folders[0], "--trust-remote-code") as one,
        serving(model, folders[1], "--trust-remote-code") as two,
        another_front_end(tmp_path, one, two) as both,
    ):

        def stream(url: str, text: str = "[tale]") -> list[Asking]:
            return [Asking(one, text, url=url, seed=number) for number in range(EACH)]

        losing, spared, shared = stream(one.url, "[endless]"), stream(two.url), stream(both)
        everyone = [*losing, *spared, *shared]
        wait_for(lambda: all(len(each.answer.at) > 5 for each in everyone), "every stream")
        front_end(one).send_signal(signal.SIGKILL)

        for asking in losing:
            assert isinstance(asking.error, openai.APIConnectionError | openai.APIError)
            assert ENDLESS.startswith(asking.answer.text)
            assert asking.answer.finish is None
        answers = [asking.result() for asking in (*spared, *shared)]
        assert [answer.text for answer in answers] == [TALE] * (2 * EACH)
        assert all(answer.gap_s < 1.0 for answer in answers)

        wait_for(lambda: running(one) + running(two) == 0, "workers that nobody waits for", SOON_S)

        # Another one listens in its place, and no worker was lost.
        assert one.chat("[tale]", max_tokens=None).choices[0].message.content == TALE
        assert one.autopsies() == two.autopsies() == []
