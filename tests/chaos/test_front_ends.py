"""A front end that is killed takes its own clients' connections with it, and nothing else."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import psutil

from mayfly_cli.commands.control import read_roster
from support.chaos_client import StreamingClient
from support.models.scripted import ScriptedReply
from support.server import Server, another_front_end, serving, wait_for

TALE = " ".join(f"word{number}" for number in range(60))
ENDLESS = "and on " * 1500
EACH = 3
TRIES = 3
SOON_S = 10.0
CONTINUATIONS = "mayfly_continuations_total"


def front_end(server: Server) -> psutil.Process:
    """The one that this server's reaper looks after."""
    found = [p for p in server.processes() if "mayfly_server.front" in p.cmdline()]
    return found[-1]


def running(server: Server) -> int:
    """Requests that a node's workers have; asked of the node, and of no front end."""
    return sum(slot.running + slot.waiting for slot in read_roster(server.state_dir).slots)


def continued(url: str) -> float:
    """Counts requests of a front end that went on at another worker."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    assert f"# TYPE {CONTINUATIONS} counter" in lines
    return sum(float(line.split()[-1]) for line in lines if line.startswith(CONTINUATIONS))


def test_a_killed_front_end_leaves_all_others_untouched(
    scripted_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Two nodes with a front end each, and a third front end that knows both nodes."""
    model = scripted_model(
        [ScriptedReply("[tale]", TALE), ScriptedReply("[endless]", ENDLESS)], step_s=0.02
    )
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    with (
        serving(model, folders[0], "--trust-remote-code") as one,
        serving(model, folders[1], "--trust-remote-code") as two,
        another_front_end(tmp_path, one, two) as both,
    ):
        # A busy machine may stop any stream for a moment, but not each time.
        tries = (unnoticed(one, two.url, both) for _ in range(TRIES))
        assert any(tries), "streams of other front ends stood still"
        wait_for(lambda: running(one) + running(two) == 0, "workers that nobody waits for", SOON_S)

        # Another one listens in its place, and no worker was lost.
        assert one.chat("[tale]", max_tokens=None).choices[0].message.content == TALE
        assert one.autopsies() == two.autopsies() == []


def unnoticed(one: Server, *others: str) -> bool:
    """Kills a server's front end while all have streams: whether those of the others went on."""
    one.wait_ready()

    def stream(url: str, text: str = "[tale]") -> list[StreamingClient]:
        return [StreamingClient(one, text, url=url, seed=number) for number in range(EACH)]

    losing = stream(one.url, "[endless]")
    spared = [asking for url in others for asking in stream(url)]
    wait_for(lambda: all(len(each.answer.at) > 5 for each in (*losing, *spared)), "every stream")
    front_end(one).send_signal(signal.SIGKILL)
    midway = all(asking.answer.finish is None for asking in spared)

    for asking in losing:
        assert isinstance(asking.error, openai.APIConnectionError | openai.APIError)
        assert ENDLESS.startswith(asking.answer.text)
        assert asking.answer.finish is None
    answers = [asking.result() for asking in spared]
    assert [answer.text for answer in answers] == [TALE] * len(spared)
    assert [continued(url) for url in others] == [0.0] * len(others)
    return midway and all(answer.gap_s < 1.0 for answer in answers)
