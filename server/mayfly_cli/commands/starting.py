"""What ``mayfly serve`` and ``mayfly node`` do before and after they differ."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import typer

from mayfly_cli.failure import fail

if TYPE_CHECKING:
    from mayfly_cli.config.assembly import Model
    from mayfly_cli.config.keys import ModelTable, ServerKeys
    from mayfly_cli.progress import Audience
    from mayfly_reaper.settings import NodeSettings

HARD_LIMIT_OF_MLX_LM = 4096
"""mlx_lm.utils sets the limits of open files of every process that imports it: to 2048 and this."""

# -P: the folder that mayfly was started in must not shadow imports.
FETCH = (sys.executable, "-P", "-m", "mayfly_worker.fetch")


def stop_as_ctrl_c_does() -> None:
    """Until the node takes the signals over, they end a download in good order."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, signal.default_int_handler)


def require_mlx() -> None:
    """On Linux, MLX comes with an extra that may have been left out. Looked for, never imported:
    this process becomes the reaper."""
    from importlib.util import find_spec

    if find_spec("mlx") is None or find_spec("mlx_lm") is None:
        fail(
            "MLX is not installed in this Python; in Mayfly's checkout, install the extra for this "
            "machine: pip install '.[cpu]', '.[cuda12]' or '.[cuda13]'"
        )


def require_open_files() -> None:
    """Raises the hard limit for this process and its children where it has to be and may be:
    otherwise each worker would end at its import of mlx-lm."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= HARD_LIMIT_OF_MLX_LM:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, HARD_LIMIT_OF_MLX_LM))
    except (ValueError, OSError):
        fail(
            f"a process may have at most {hard} files open here, and mlx-lm needs a limit of "
            f"{HARD_LIMIT_OF_MLX_LM}: raise the hard one (ulimit -Hn, LimitNOFILE of a unit)"
        )


def audience_for(keys: ServerKeys, *, keyed: bool) -> Audience:
    """Bars where a person watches, lines elsewhere, and nothing but log lines where programs read.
    From now on this process logs as the keys say."""
    from mayfly_cli.config import assembly
    from mayfly_cli.progress import LogLines, PlainLines, Reporter
    from mayfly_protocol.common import logs

    logs.configure(assembly.logs(keys))
    if keys.log_format == "json":
        return LogLines()
    if sys.stdout.isatty():
        from rich.console import Console

        from mayfly_cli.progress import Bars

        return Reporter(Bars(Console()), keyed=keyed)
    return Reporter(PlainLines(typer.echo), keyed=keyed)


def _fetch(table: ModelTable, audience: Audience) -> Model:
    import platformdirs

    from mayfly_cli.commands.fetching import FetchFailed, fetch
    from mayfly_cli.config.assembly import Model

    cache = platformdirs.user_cache_path("mayfly")
    try:
        fetched = fetch(
            [*FETCH, "--cache", str(cache), "--", *([table.path] if table.path else [])],
            audience.fetching,
        )
    except FetchFailed as error:
        audience.close()
        fail(str(error))
    audience.fetched(fetched.name)
    return Model(table, fetched.path, fetched.name)


def run(
    tables: Iterable[ModelTable],
    settings: Callable[[list[Model]], NodeSettings],
    audience: Audience,
) -> int:
    """Fetches the models and runs a node with them, to its end. Returns its exit status."""
    from mayfly_reaper.node import Node
    from mayfly_reaper.paths import StartError

    try:
        models = [_fetch(table, audience) for table in tables]
        return Node(settings(models), audience).run()
    except StartError as error:
        audience.close()
        fail(str(error))
    finally:
        audience.close()


def node_name() -> str:
    """What others know this machine's node by."""
    import socket

    return socket.gethostname().partition(".")[0] or "localhost"
