"""``mayfly front``: an HTTP front end for nodes anywhere; it needs no MLX."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import typer

from mayfly_cli.commands.control import state_directory
from mayfly_cli.config.options import configured
from mayfly_cli.failure import fail


def front(config: Path | None, given: Mapping[str, Any]) -> None:
    """Serve the models of nodes over an OpenAI-compatible HTTP API.

    It keeps nothing: any number may serve the same nodes, and any may end at any time. Where the
    nodes stand in the configuration file, they are read again as soon as that changes. Aliases of
    models are those of its own [[models]]; what nodes have of them is not passed on.
    """
    from pydantic import TypeAdapter

    from mayfly_cli.config import assembly
    from mayfly_server import front
    from mayfly_server.settings import FrontSettings
    from mayfly_server.uvicorn_server import ListenError

    configuration = configured(config, given)
    keys = configuration.keys
    if not keys.nodes:
        fail("no node is named: say --node tcp://KEY@HOST:PORT, or nodes = [...] in mayfly.toml")
    file = configuration.file
    settings = TypeAdapter(FrontSettings).validate_python(
        {
            **assembly.front_settings(keys, assembly.aliases_by_path(keys.models)),
            "nodes": keys.nodes,
            "nodes_file": file if configuration.origins["nodes"] == str(file) else None,
            "state_dir": state_directory(keys.state_dir),
            "grace_s": keys.stop_grace,
        }
    )
    try:
        with ExitStack() as stack:
            listeners = front.own_listeners(keys.host, keys.port)
            for listener in listeners:
                stack.enter_context(listener)
            front.serve(settings, listeners)
    except (front.FrontError, ListenError) as error:
        fail(str(error))
    raise typer.Exit(0)
