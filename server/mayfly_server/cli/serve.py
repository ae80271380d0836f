"""``mayfly serve``: one machine's server, from a model's name to an address."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mayfly_server.cli.configuration.options import configured
from mayfly_server.cli.control import state_directory
from mayfly_server.cli.failure import fail

if TYPE_CHECKING:
    from mayfly_reaper.settings import NodeSettings
    from mayfly_server.cli.configuration.assembly import Model
    from mayfly_server.cli.configuration.keys import ModelTable, ServerKeys
    from mayfly_server.cli.progress import Reporter

# -P: the folder that mayfly was started in must not shadow imports.
FETCH = (sys.executable, "-P", "-m", "mayfly_worker.fetch")
FRONT_END = (
    *(sys.executable, "-P", "-m", "mayfly_server.front"),
    *("--fd", "{fd}", "--node", "{node}", "--grace", "{grace}"),
)


def serve(config: Path | None, given: Mapping[str, Any]) -> None:
    """Serve models over an OpenAI-compatible HTTP API.

    Every option can also be a key in a configuration file, or a variable: `mayfly config`.
    Ctrl-C, SIGTERM or SIGHUP ends the server and everything it started.
    """
    _stop_as_ctrl_c_does()
    try:
        _require_mlx()
        configuration = configured(config, given)
        keys = configuration.keys
        state = state_directory(keys.state_dir)
        keyed = _keyed(keys)
        _require_free(keys, state, keyed=keyed)
        reporter = _reporter(keyed=keyed)
        try:
            models = [_fetch(table, reporter) for table in configuration.models]
            status = _run(_settings(keys, models, state), reporter)
        finally:
            reporter.close()
    except KeyboardInterrupt:
        status = 0
    raise typer.Exit(status)


def _stop_as_ctrl_c_does() -> None:
    """Until the node takes the signals over, they end a download in good order."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, signal.default_int_handler)


def _require_mlx() -> None:
    """On Linux, MLX comes with an extra that may have been left out. Looked for, never imported:
    this process becomes the reaper."""
    from importlib.util import find_spec

    if find_spec("mlx") is None or find_spec("mlx_lm") is None:
        fail(
            "MLX is not installed in this Python; install the extra for this machine: "
            "pip install 'mlx-mayfly[cpu]', [cuda12] or [cuda13]"
        )


def _keyed(keys: ServerKeys) -> bool:
    """Whether requests will need API keys. That they can't be read is better known at once."""
    import os

    from mayfly_server.edge.keys import KeysError, from_environment, read

    file = keys.api_keys_file
    try:
        return bool(from_environment(os.environ)) or bool(file and read(file.expanduser()))
    except KeysError as error:
        fail(str(error))


def _require_free(keys: ServerKeys, state_dir: Path, *, keyed: bool) -> None:
    """The node takes address and state directory for itself when it starts; that it can't, or may
    not without API keys, is better known before a download than after it."""
    from mayfly_reaper.errors import StartError
    from mayfly_reaper.front_end import listen
    from mayfly_reaper.paths import locked
    from mayfly_server.edge.exposure import exposed, refusal

    try:
        with locked(state_dir), listen(keys.host, keys.port) as listener:
            address = exposed(listener)
            if address is not None and not (keyed or keys.insecure):
                fail(refusal(address))
    except StartError as error:
        fail(str(error))


def _reporter(*, keyed: bool) -> Reporter:
    """Bars where a person watches, lines elsewhere."""
    from mayfly_server.cli.progress import PlainLines, Reporter

    if sys.stdout.isatty():
        from rich.console import Console

        from mayfly_server.cli.bars import Bars

        return Reporter(Bars(Console()), keyed=keyed)
    return Reporter(PlainLines(typer.echo), keyed=keyed)


def _fetch(table: ModelTable, reporter: Reporter) -> Model:
    import platformdirs

    from mayfly_server.cli.configuration.assembly import Model
    from mayfly_server.cli.fetching import FetchFailed, fetch

    cache = platformdirs.user_cache_path("mayfly")
    try:
        fetched = fetch(
            [*FETCH, "--cache", str(cache), "--", *([table.path] if table.path else [])],
            reporter.fetching,
        )
    except FetchFailed as error:
        reporter.close()
        fail(str(error))
    reporter.fetched(fetched.name)
    return Model(table, fetched.path, fetched.name)


def _settings(keys: ServerKeys, models: list[Model], state_dir: Path) -> NodeSettings:
    """Ends the command where two models would have the same name."""
    import json
    import socket

    from mayfly_reaper.settings import Address, FrontEnd, NodeSettings
    from mayfly_server.cli.configuration import assembly
    from mayfly_server.cli.configuration.loading import ConfigurationError

    try:
        front = assembly.front_settings(keys, assembly.aliases_of(models))
    except ConfigurationError as error:
        fail(str(error))
    # On one machine nobody else asks the reaper what it counts.
    command = (*FRONT_END, "--settings", json.dumps({**front, "node_metrics": True}))
    return NodeSettings(
        node=socket.gethostname().partition(".")[0] or "localhost",
        state_dir=state_dir,
        pools=tuple(assembly.pool(model) for model in models),
        front_end=FrontEnd(command=command, host=keys.host, port=keys.port),
        metrics=Address(keys.metrics_host, keys.metrics_port) if keys.metrics_port else None,
        preload_blas=keys.preload_blas,
        caffeinate=keys.caffeinate,
        budgets=assembly.budgets(keys),
    )


def _run(settings: NodeSettings, reporter: Reporter) -> int:
    from mayfly_reaper.errors import StartError
    from mayfly_reaper.node import Node

    try:
        return Node(settings, reporter).run()
    except StartError as error:
        reporter.close()
        fail(str(error))
