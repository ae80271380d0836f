"""Runs a node (the reaper with its workers) as a process of its own, and prints the node's events
(slots that changed, notes for the operator) as JSON lines."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from mayfly_protocol.roster import SlotView
from mayfly_reaper.node import Node, StartError
from mayfly_reaper.observer import NOBODY, About
from mayfly_reaper.rules import worker
from mayfly_reaper.settings import (
    Budgets,
    FrontEnd,
    Lifetime,
    MetricsAddress,
    NodeSettings,
    Pool,
)


class Printer:
    def slot_changed(self, view: SlotView) -> None:
        self._print("slot", view.slot, view.state, view.incarnation, view.detail, view.retry_in_s)

    def front_end_ready(self, host: str, port: int) -> None:
        self._print("front", host, port)

    def note(self, text: str, about: About = NOBODY) -> None:
        self._print("note", text)

    def _print(self, *words: object) -> None:
        os.write(1, json.dumps(words).encode() + b"\n")


def main() -> None:
    given = json.loads(sys.argv[1])
    worker.LAST_MESSAGES_S = given["last_words_s"] or worker.LAST_MESSAGES_S
    settings = NodeSettings(
        node="test",
        state_dir=Path(given["state_dir"]),
        pools=(
            Pool(
                "org/fake model",
                Path("/nowhere"),
                given["workers"],
                given["options"],
                lifetime=Lifetime(**given["lifetime"]),
            ),
        ),
        front_end=FrontEnd(tuple(given["front_end"]), port=given["port"])
        if given["front_end"]
        else None,
        metrics=MetricsAddress(port=given["metrics"]),
        preload_blas=given["preload_blas"],
        budgets=Budgets(**given["budgets"]),
        worker_command=tuple(given["worker_command"]),
    )
    try:
        sys.exit(Node(settings, Printer()).run())
    except StartError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
