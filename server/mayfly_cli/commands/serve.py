"""``mayfly serve``: fetches models and serves them over HTTP, all on this machine.

Its options are declared on the fields of the settings dataclasses, in each package's settings.py.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mayfly_cli.commands import starting
from mayfly_cli.commands.control import state_directory
from mayfly_cli.config.keys import Values, build
from mayfly_cli.config.options import configured
from mayfly_cli.failure import fail
from mayfly_reaper.settings import FrontEnd, NodeSettings
from mayfly_server.settings import FrontSettings

if TYPE_CHECKING:
    from mayfly_cli.config.models import ConfiguredModel

# -P: the folder that mayfly was started in must not shadow imports.
FRONT_END = (
    *(sys.executable, "-P", "-m", "mayfly_server.front"),
    *("--fd", "{fd}", "--node", "{node}", "--grace", "{grace}"),
)


def serve(config: Path | None, given: Values) -> None:
    """Serve models over an OpenAI-compatible HTTP API.

    Every option can also be a key in a configuration file, or a variable: see `mayfly config`.
    Ctrl-C, SIGTERM or SIGHUP ends the server and everything it started.
    """
    starting.treat_signals_as_ctrl_c()
    try:
        starting.require_mlx()
        starting.require_open_files()
        configuration = configured(config, given)
        values = configuration.values
        state_dir = state_directory(values["state_dir"])
        has_keys = _has_api_keys(values)
        _require_address(values, state_dir, has_keys=has_keys)
        status = starting.run(
            configuration.models,
            lambda models: _settings(values, models, state_dir),
            starting.make_observer(values, has_keys=has_keys),
        )
    except KeyboardInterrupt:
        status = 0
    raise typer.Exit(status)


def _has_api_keys(values: Values) -> bool:
    """True if API keys are configured, so that requests need one. Ends the command with an error if
    the keys cannot be read."""
    from mayfly_server.http.api_keys import KeysError, from_environment, read_keys_file

    file = values["api_keys_file"]
    try:
        return bool(from_environment(os.environ)) or bool(
            file and read_keys_file(file.expanduser())
        )
    except KeysError as error:
        fail(str(error))


def _require_address(values: Values, state_dir: Path, *, has_keys: bool) -> None:
    """Ends the command with an error if the server's address or the state directory is in use, or
    if other machines could reach the server and there are no API keys. The node checks that itself,
    but only after the models are downloaded."""
    from mayfly_reaper.paths import StartError, locked
    from mayfly_reaper.processes.front_end import listen
    from mayfly_server.http.api_keys import exposed_address, keys_needed

    try:
        with locked(state_dir), listen(values["host"], values["port"]) as listener:
            address = exposed_address(listener)
            if address is not None and not (has_keys or values["insecure"]):
                fail(keys_needed(address))
    except StartError as error:
        fail(str(error))


def _settings(values: Values, models: list[ConfiguredModel], state_dir: Path) -> NodeSettings:
    """Makes the settings of the node and of its front end. Ends the command with an error if two
    models have the same name."""
    from mayfly_cli.config.loading import ConfigurationError
    from mayfly_cli.config.models import aliases_of

    try:
        aliases = aliases_of(models)
    except ConfigurationError as error:
        fail(str(error))
    # On one machine, the front end's /metrics also has to show the reaper's metrics.
    front = build(FrontSettings, values, aliases=aliases, node_metrics=True)
    command = (*FRONT_END, "--settings", json.dumps(asdict(front), default=str))
    front_end = build(FrontEnd, values, command=command)
    return starting.node_settings(values, models, state_dir, front_end=front_end)
