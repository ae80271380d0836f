"""``mayfly node``: workers on this machine for front ends anywhere."""

from __future__ import annotations

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
    from mayfly_reaper.settings import Network, NodeSettings


def node(config: Path | None, given: Mapping[str, Any]) -> None:
    """Run models on this machine for front ends on this and others.

    It listens on the loopback interface; with a key (`mayfly keys init`) on any other, too. Ctrl-C,
    SIGTERM or SIGHUP ends it and its workers; `mayfly drain` lets them finish.
    """
    starting.stop_as_ctrl_c_does()
    try:
        starting.require_mlx()
        starting.require_open_files()
        configuration = configured(config, given)
        keys = configuration.keys
        state = state_directory(keys.state_dir)
        network = _network(keys, sum(model.workers for model in configuration.models))
        _require_free(network, state)
        status = starting.run(
            configuration.models,
            lambda models: _settings(keys, network, models, state),
            starting.audience_for(keys, keyed=False),
        )
    except KeyboardInterrupt:
        status = 0
    raise typer.Exit(status)


def _network(keys: ServerKeys, workers: int) -> Network:
    """Ends the command, as wrong usage, where there are too few ports for so many workers."""
    from mayfly_protocol.transport.addresses import AddressError, port_range
    from mayfly_reaper.settings import Network

    try:
        ports = port_range(keys.worker_ports)
    except AddressError as error:
        raise typer.BadParameter(str(error), param_hint="--worker-ports") from error
    if ports.count <= workers:
        raise typer.BadParameter(
            f"{workers} workers need a port each, and one more for while one of them is replaced: "
            f"{ports} are {ports.count}",
            param_hint="--worker-ports",
        )
    return Network(keys.control_host, keys.control_port, ports)


def _require_free(network: Network, state_dir: Path) -> None:
    """That the node may not listen there, or can't, is better known before a download."""
    from mayfly_reaper.paths import StartError, locked
    from mayfly_reaper.processes.front_end import listen
    from mayfly_reaper.publish.sockets import own_pair

    options = ("--control-host", "--control-port")
    try:
        own_pair(network, state_dir)
        with (
            locked(state_dir),
            listen(network.host, network.port, options),
            listen(network.host, network.port + 1, options),
        ):
            pass
    except StartError as error:
        fail(str(error))


def _settings(
    keys: ServerKeys, network: Network, models: list[Model], state_dir: Path
) -> NodeSettings:
    """Ends the command where two models would have the same name."""
    from mayfly_cli.config import assembly
    from mayfly_cli.config.loading import ConfigurationError
    from mayfly_reaper.settings import MetricsAddress, NodeSettings

    try:
        assembly.aliases_of(models)
    except ConfigurationError as error:
        fail(str(error))
    return NodeSettings(
        node=starting.node_name(),
        state_dir=state_dir,
        pools=tuple(assembly.pool(model) for model in models),
        network=network,
        metrics=MetricsAddress(keys.metrics_host, keys.metrics_port),
        preload_blas=keys.preload_blas,
        caffeinate=keys.caffeinate,
        budgets=assembly.budgets(keys),
        logs=assembly.logs(keys),
    )
