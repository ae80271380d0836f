"""``mayfly recycle`` and ``mayfly drain`` against a node with fake workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from mayfly_cli.commands import control
from mayfly_reaper.paths import runtime_of
from support.command_line import mayfly
from support.node import RunningNode, fake_front_end, fake_worker

QUICK = {"retry_s": 0.1, "spacing_s": 0.0}


@pytest.mark.process
def test_workers_are_recycled_and_the_server_is_drained(tmp_path: Path) -> None:
    with RunningNode(tmp_path, workers=2, front_end=fake_front_end(), budgets=QUICK) as node:
        node.roster(lambda roster: [slot.state for slot in roster.slots] == ["ready"] * 2)
        refused = mayfly("recycle", "nobody", "--state-dir", tmp_path)
        assert refused.exit_code == 1
        assert "there is no slot 'nobody' here, but fake-model-0, fake-model-1" in refused.stderr
        done = mayfly("recycle", "fake-model-1", "--state-dir", tmp_path)
        assert (done.exit_code, done.stdout) == (0, "recycling fake-model-1\n")
        node.roster(lambda roster: {s.incarnation for s in roster.slots} == {1, 3})
        assert mayfly("recycle", "--all", "--state-dir", tmp_path).exit_code == 0
        node.roster(
            lambda roster: (
                len(roster.slots) == 2
                and all(s.state == "ready" and s.incarnation > 3 for s in roster.slots)
            )
        )
        drained = mayfly("drain", "--grace", "5", "--state-dir", tmp_path)
        assert drained.stdout == "draining fake-model-0, fake-model-1\n"
        assert node.process.wait(20) == 0
        assert not (tmp_path / "autopsies.jsonl").exists()


@pytest.mark.process
def test_a_drain_can_be_left_to_itself_and_a_signal_shortens_it(tmp_path: Path) -> None:
    worker = fake_worker("--behave", "deaf")
    budgets = {"stop_s": 0.1, "leave_s": 0.1, "terminate_s": 0.1, "stacks_s": 0.1}
    with RunningNode(tmp_path, worker, budgets=budgets) as node:
        node.ready()
        assert mayfly("drain", "--grace", "60", "--no-wait", "--state-dir", tmp_path).exit_code == 0
        node.slot(lambda view: view.state == "draining")
        again = mayfly("drain", "--no-wait", "--state-dir", tmp_path)
        assert again.stdout == "this node is stopping already\n"
        node.process.terminate()
        assert node.process.wait(10) == 0


@pytest.mark.parametrize("command", [("recycle", "--all"), ("drain",)])
def test_without_a_server_there_is_nobody_to_tell(
    tmp_path: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = mayfly(*command, "--state-dir", tmp_path)
    assert result.exit_code == 1
    assert f"no server runs with the state directory {tmp_path}" in result.stderr
    monkeypatch.setattr(control, "ANSWER_S", 0.1)
    runtime = runtime_of(tmp_path)
    runtime.folder.mkdir(parents=True, mode=0o700)
    left = runtime.folder / "node.ipc"
    left.touch()  # as a node that was killed leaves it
    try:
        result = mayfly(*command, "--state-dir", tmp_path)
    finally:
        left.unlink()
        runtime.folder.rmdir()
    assert result.exit_code == 1
    assert "does not answer" in result.stderr


@pytest.mark.parametrize("arguments", [(), ("a-slot", "--all")])
def test_a_recycle_names_one_slot_or_all(arguments: tuple[str, ...]) -> None:
    result = mayfly("recycle", *arguments)
    assert result.exit_code == 2
    assert "name one slot, or say --all" in result.stderr
