"""``mayfly serve``: one machine's server, from a model's name to an address."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mayfly_cli.commands import starting
from mayfly_cli.commands.control import state_directory
from mayfly_cli.config.options import configured
from mayfly_cli.failure import fail

if TYPE_CHECKING:
    from mayfly_cli.config.assembly import Model
    from mayfly_cli.config.keys import ServerKeys
    from mayfly_reaper.settings import NodeSettings

# -P: the folder that mayfly was started in must not shadow imports.
FRONT_END = (
    *(sys.executable, "-P", "-m", "mayfly_server.front"),
    *("--fd", "{fd}", "--node", "{node}", "--grace", "{grace}"),
)


def serve(config: Path | None, given: Mapping[str, Any]) -> None:
    """Serve models over an OpenAI-compatible HTTP API.

    Every option can also be a key in a configuration file, or a variable: `mayfly config`.
    Ctrl-C, SIGTERM or SIGHUP ends the server and everything it started.
    """
    starting.stop_as_ctrl_c_does()
    try:
        starting.require_mlx()
        starting.require_open_files()
        configuration = configured(config, given)
        keys = configuration.keys
        state = state_directory(keys.state_dir)
        keyed = _keyed(keys)
        _require_free(keys, state, keyed=keyed)
        status = starting.run(
            configuration.models,
            lambda models: _settings(keys, models, state),
            starting.audience_for(keys, keyed=keyed),
        )
    except KeyboardInterrupt:
        status = 0
    raise typer.Exit(status)


def _keyed(keys: ServerKeys) -> bool:
    """Whether requests will need API keys. That they can't be read is better known at once."""
    import os

    from mayfly_server.http.api_keys import KeysError, from_environment, read_keys_file

    file = keys.api_keys_file
    try:
        return bool(from_environment(os.environ)) or bool(
            file and read_keys_file(file.expanduser())
        )
    except KeysError as error:
        fail(str(error))


def _require_free(keys: ServerKeys, state_dir: Path, *, keyed: bool) -> None:
    """The node takes address and state directory for itself when it starts; that it can't, or may
    not without API keys, is better known before a download than after it."""
    from mayfly_reaper.paths import StartError, locked
    from mayfly_reaper.processes.front_end import listen
    from mayfly_server.http.api_keys import exposed_address, keys_needed

    try:
        with locked(state_dir), listen(keys.host, keys.port) as listener:
            address = exposed_address(listener)
            if address is not None and not (keyed or keys.insecure):
                fail(keys_needed(address))
    except StartError as error:
        fail(str(error))


def _settings(keys: ServerKeys, models: list[Model], state_dir: Path) -> NodeSettings:
    """Ends the command where two models would have the same name."""
    import json

    from mayfly_cli.config import assembly
    from mayfly_cli.config.loading import ConfigurationError
    from mayfly_reaper.settings import FrontEnd, MetricsAddress, NodeSettings

    try:
        front = assembly.front_settings(keys, assembly.aliases_of(models))
    except ConfigurationError as error:
        fail(str(error))
    # On one machine nobody else asks the reaper what it counts.
    command = (*FRONT_END, "--settings", json.dumps({**front, "node_metrics": True}))
    return NodeSettings(
        node=starting.node_name(),
        state_dir=state_dir,
        pools=tuple(assembly.pool(model) for model in models),
        front_end=FrontEnd(command=command, host=keys.host, port=keys.port),
        metrics=MetricsAddress(keys.metrics_host, keys.metrics_port),
        preload_blas=keys.preload_blas,
        caffeinate=keys.caffeinate,
        budgets=assembly.budgets(keys),
        logs=assembly.logs(keys),
    )
