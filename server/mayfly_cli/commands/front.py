"""``mayfly front``: an HTTP front end for nodes on any machine; it needs no MLX."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import typer

from mayfly_cli.commands.control import state_directory
from mayfly_cli.config.keys import Values, build
from mayfly_cli.config.options import configured
from mayfly_cli.failure import fail


def front(config: Path | None, given: Values) -> None:
    """Serve the models of nodes over an OpenAI-compatible HTTP API.

    A front end keeps no state: any number may serve the same nodes, and any may end at any time.
    If the nodes are listed in the configuration file, the list is read again whenever the file
    changes. Aliases of models are taken from [[models]] in this front end's own configuration, not
    from the nodes.
    """
    from mayfly_cli.config.models import aliases_by_path
    from mayfly_server import front
    from mayfly_server.settings import FrontSettings

    configuration = configured(config, given)
    values, file = configuration.values, configuration.file
    if not values["nodes"]:
        fail("no node is named: use --node tcp://KEY@HOST:PORT, or nodes = [...] in mayfly.toml")
    settings = build(
        FrontSettings,
        values,
        nodes_file=file if configuration.origins["nodes"] == str(file) else None,
        state_dir=state_directory(values["state_dir"]),
        grace_s=values["stop_grace"],
        aliases=aliases_by_path(values["models"]),
    )
    try:
        with ExitStack() as stack:
            listeners = front.own_listeners(values["host"], values["port"])
            for listener in listeners:
                stack.enter_context(listener)
            front.serve(settings, listeners)
    except front.FrontError as error:
        fail(str(error))
    raise typer.Exit(0)
