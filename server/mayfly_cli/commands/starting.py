"""Steps that both ``mayfly serve`` and ``mayfly node`` take: checks of the machine, fetching of
models, and running the node."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mayfly_cli.config.keys import Values, build
from mayfly_cli.failure import fail
from mayfly_protocol.settings import LogSettings
from mayfly_reaper.settings import NodeSettings

if TYPE_CHECKING:
    from mayfly_cli.config.models import ConfiguredModel
    from mayfly_cli.progress import StartObserver

HARD_LIMIT_OF_MLX_LM = 4096
"""Hard limit of open files that mlx_lm.utils sets when it is imported; it sets the soft limit to
2048. The import fails in a process whose hard limit is lower."""

# -P: the folder that mayfly was started in must not shadow imports.
FETCH = (sys.executable, "-P", "-m", "mayfly_worker.fetch")


def treat_signals_as_ctrl_c() -> None:
    """Makes SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does, so that they end a download
    cleanly. The node sets its own signal handlers later."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, signal.default_int_handler)


def require_mlx() -> None:
    """Ends the command with an error if MLX is not installed: on Linux it is an optional extra of
    the package. MLX itself is not imported, because this process becomes the one that watches the
    workers, which must not depend on MLX."""
    from importlib.util import find_spec

    if find_spec("mlx") is None or find_spec("mlx_lm") is None:
        fail(
            "MLX is not installed in this Python; in Mayfly's checkout, install the extra for this "
            "machine: pip install '.[cpu]', '.[cuda12]' or '.[cuda13]'"
        )


def require_open_files() -> None:
    """Raises the hard limit of open files, for this process and its children, if it is too low: the
    import of mlx-lm would fail in each worker. Ends the command with an error if the limit cannot
    be raised."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= HARD_LIMIT_OF_MLX_LM:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, HARD_LIMIT_OF_MLX_LM))
    except (ValueError, OSError):
        fail(
            f"a process may have at most {hard} files open here, and mlx-lm needs a limit of "
            f"{HARD_LIMIT_OF_MLX_LM}: raise the hard limit (ulimit -Hn, LimitNOFILE of a unit)"
        )


def make_observer(values: Values, *, has_keys: bool) -> StartObserver:
    """Configures the log of this process, and makes the observer that shows the start of a node: by
    progress bars in a terminal, by lines of text in a file or pipe, or by log lines only if the log
    is JSON. ``has_keys`` is True if requests need API keys."""
    from mayfly_cli.progress import PlainLines, Reporter
    from mayfly_protocol.common import logs

    settings = build(LogSettings, values)
    logs.configure(settings)
    if settings.form == "json":
        from mayfly_cli.progress import LogLines

        return LogLines()
    if sys.stdout.isatty():
        from rich.console import Console

        from mayfly_cli.progress import Bars

        return Reporter(Bars(Console()), needs_key=has_keys)
    return Reporter(PlainLines(typer.echo), needs_key=has_keys)


def run(
    tables: Iterable[Values],
    settings: Callable[[list[ConfiguredModel]], NodeSettings],
    observer: StartObserver,
) -> int:
    """Fetches the models of the ``[[models]]`` ``tables``, and runs a node with them until it ends.
    Returns the exit status. ``settings`` makes the node's settings from the fetched models."""
    from mayfly_reaper.node import Node
    from mayfly_reaper.paths import StartError

    try:
        models = [_fetch(table, observer) for table in tables]
        return Node(settings(models), observer).run()
    except StartError as error:
        observer.close()
        fail(str(error))
    finally:
        observer.close()


def _fetch(table: Values, observer: StartObserver) -> ConfiguredModel:
    import platformdirs

    from mayfly_cli.commands.fetching import FetchFailed, fetch
    from mayfly_cli.config.models import ConfiguredModel

    cache = platformdirs.user_cache_path("mayfly")
    model = [table["path"]] if table["path"] else []
    try:
        fetched = fetch([*FETCH, "--cache", str(cache), "--", *model], observer.fetching)
    except FetchFailed as error:
        observer.close()
        fail(str(error))
    observer.fetched(fetched.name)
    return ConfiguredModel(table, fetched.path, fetched.name)


def node_settings(
    values: Values, models: Iterable[ConfiguredModel], state_dir: Path, **others: Any
) -> NodeSettings:
    """Makes the settings of the node on this machine, named after the machine. ``others`` are
    settings that only one of ``mayfly serve`` and ``mayfly node`` has."""
    import socket

    return build(
        NodeSettings,
        values,
        node=socket.gethostname().partition(".")[0] or "localhost",
        state_dir=state_dir,
        pools=tuple(model.pool for model in models),
        **others,
    )
