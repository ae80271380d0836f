"""``mayfly quarantine`` against a node that has something in quarantine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mayfly_protocol.roster import Quarantine
from support.command_line import mayfly
from support.node import RunningNode

pytestmark = pytest.mark.process


def test_what_is_refused_is_shown_and_released(tmp_path: Path) -> None:
    with RunningNode(tmp_path) as node:
        node.ready()
        shown = mayfly("quarantine", "list", "--state-dir", tmp_path)
        assert shown.stdout == "nothing is in quarantine\n"
        for name in ("aa01", "aa02", "b"):
            assert node.ask(Quarantine(name, "crashed", 119.5)).ok
        node.roster(lambda roster: len(roster.quarantined) == 3)
        shown = mayfly("quarantine", "list", "--state-dir", tmp_path)
        # Some time passes between the command and the list.
        assert re.fullmatch(r"aa01  crashed  1 min [345]\d s left", shown.stdout.splitlines()[0])
        assert len(shown.stdout.splitlines()) == 3
        listed = json.loads(mayfly("quarantine", "list", "--json", "--state-dir", tmp_path).stdout)
        assert [entry["fingerprint"] for entry in listed] == ["aa01", "aa02", "b"]
        wrong = mayfly("quarantine", "clear", "c", "--state-dir", tmp_path)
        assert wrong.exit_code == 1
        assert "nothing in quarantine begins with 'c'" in wrong.stderr
        released = mayfly("quarantine", "clear", "aa", "--state-dir", tmp_path)
        assert released.stdout == "released 2\n"
        node.roster(lambda roster: [each.fingerprint for each in roster.quarantined] == ["b"])
        assert mayfly("quarantine", "clear", "--state-dir", tmp_path).stdout == "released 1\n"
        node.roster(lambda roster: not roster.quarantined)
