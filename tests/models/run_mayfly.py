"""The ``mayfly`` command with a reaper of another patience: its budgets are the first argument, as
JSON. For tests."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

from mayfly_reaper.settings import Budgets, NodeSettings
from mayfly_server.cli import main, serve


def main_with(budgets: Budgets) -> None:
    configured = serve._settings

    def impatient(*arguments: Any, **options: Any) -> NodeSettings:
        return replace(configured(*arguments, **options), budgets=budgets)

    serve._settings = impatient
    main()


if __name__ == "__main__":
    main_with(Budgets(**json.loads(sys.argv.pop(1))))
