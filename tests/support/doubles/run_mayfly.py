"""Runs the ``mayfly`` command with other time limits of the reaper (the workers' supervisor) and of
the front end. The first argument is a JSON object with the limits that differ from their
defaults."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from mayfly_cli.app import main
from mayfly_cli.commands import serve
from mayfly_reaper.settings import Budgets, NodeSettings

BUDGETS = {field.name for field in fields(Budgets)}


def main_with(patience: Mapping[str, float]) -> None:
    """Runs the ``mayfly`` command with these time limits in seconds. Names that are not fields of
    the reaper's Budgets are fields of FrontSettings."""
    configured = serve._settings
    budgets = Budgets(**{name: patience[name] for name in patience.keys() & BUDGETS})
    front = {name: patience[name] for name in patience.keys() - BUDGETS}

    def patient(*arguments: Any, **options: Any) -> NodeSettings:
        settings = configured(*arguments, **options)
        assert settings.front_end is not None
        *command, given = settings.front_end.command
        assert command[-1] == "--settings"
        command.append(json.dumps({**json.loads(given), **front}))
        front_end = replace(settings.front_end, command=tuple(command))
        return replace(settings, budgets=budgets, front_end=front_end)

    serve._settings = patient
    main()


if __name__ == "__main__":
    main_with(json.loads(sys.argv.pop(1)))
