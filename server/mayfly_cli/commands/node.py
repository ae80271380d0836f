"""``mayfly node``: runs workers on this machine, for front ends on this and other machines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mayfly_cli.commands import starting
from mayfly_cli.commands.control import state_directory
from mayfly_cli.config.keys import Values, build
from mayfly_cli.config.options import configured
from mayfly_cli.failure import fail
from mayfly_reaper.settings import Network, NodeSettings

if TYPE_CHECKING:
    from mayfly_cli.config.models import ConfiguredModel


def node(config: Path | None, given: Values) -> None:
    """Run models on this machine for front ends on this and other machines.

    The node listens on the loopback interface; with a key (`mayfly keys init`) on any other, too.
    Ctrl-C, SIGTERM or SIGHUP ends the node and its workers; `mayfly drain` lets the workers finish
    their requests first.
    """
    starting.treat_signals_as_ctrl_c()
    try:
        starting.require_mlx()
        starting.require_open_files()
        configuration = configured(config, given)
        values = configuration.values
        state_dir = state_directory(values["state_dir"])
        network = _network(values, sum(model["workers"] for model in configuration.models))
        _require_address(network, state_dir)
        status = starting.run(
            configuration.models,
            lambda models: _settings(values, network, models, state_dir),
            starting.make_observer(values, has_keys=False),
        )
    except KeyboardInterrupt:
        status = 0
    raise typer.Exit(status)


def _network(values: Values, workers: int) -> Network:
    """Makes the settings of the node's addresses and ports. Ends the command with exit code 2
    (wrong usage) if there are too few ports for this number of workers."""
    from mayfly_protocol.transport.addresses import AddressError

    try:
        network = build(Network, values)
    except AddressError as error:
        raise typer.BadParameter(str(error), param_hint="--worker-ports") from error
    ports = network.worker_ports
    if ports.count <= workers:
        raise typer.BadParameter(
            f"{workers} workers need a port each, and one more for while one of them is replaced: "
            f"{ports} are {ports.count}",
            param_hint="--worker-ports",
        )
    return network


def _require_address(network: Network, state_dir: Path) -> None:
    """Ends the command with an error if the node cannot listen at its address, or may not, because
    it has no key. The node checks that itself, but only after the models are downloaded."""
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
    values: Values, network: Network, models: list[ConfiguredModel], state_dir: Path
) -> NodeSettings:
    """Makes the node's settings. Ends the command with an error if two models have the same
    name."""
    from mayfly_cli.config.loading import ConfigurationError
    from mayfly_cli.config.models import aliases_of

    try:
        aliases_of(models)
    except ConfigurationError as error:
        fail(str(error))
    return starting.node_settings(values, models, state_dir, network=network)
