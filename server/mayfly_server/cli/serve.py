"""``mayfly serve``: one machine's server, from a model's name to an address."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mayfly_server.cli.control import state_directory
from mayfly_server.cli.failure import fail

if TYPE_CHECKING:
    from mayfly_reaper.settings import FrontEnd, NodeSettings
    from mayfly_server.cli.fetching import Fetched
    from mayfly_server.cli.progress import Reporter

# -P: the folder that mayfly was started in must not shadow imports.
FETCH = (sys.executable, "-P", "-m", "mayfly_worker.fetch")
FRONT_END = (
    *(sys.executable, "-P", "-m", "mayfly_server.front"),
    *("--fd", "{fd}", "--node", "{node}", "--grace", "{grace}"),
)


KV_BITS = (2, 3, 4, 5, 6, 8)
"""The widths that MLX quantizes to."""


def kv_bits_checked(bits: int | None) -> int | None:
    """The option's value, refused where it is none of these."""
    if bits is not None and bits not in KV_BITS:
        raise typer.BadParameter(f"{bits} is not one of {', '.join(map(str, KV_BITS))}")
    return bits


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model's folder or Hugging Face repository id. "
            "Without one a small demo model is served.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on.", min=0, max=65535)] = 8000,
    workers: Annotated[int, typer.Option(help="Worker processes, each with the model.", min=1)] = 1,
    name: Annotated[
        str | None,
        typer.Option(help="What clients call the model; by default its own name."),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where this server keeps its state; each server needs its own. "
            "By default the platform's state directory.",
            file_okay=False,
        ),
    ] = None,
    preload_blas: Annotated[
        bool,
        typer.Option(
            "--preload-blas/--no-preload-blas",
            help="On Linux without a GPU, preload a shared OpenBLAS into workers if there is one.",
        ),
    ] = True,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run Python code that comes with the model."),
    ] = False,
    adapter: Annotated[
        Path | None,
        typer.Option(help="A folder with a LoRA adapter.", exists=True, file_okay=False),
    ] = None,
    kv_bits: Annotated[
        int | None,
        typer.Option(
            help="Quantize the KV cache to so many bits: 2, 3, 4, 5, 6 or 8.",
            callback=kv_bits_checked,
        ),
    ] = None,
    max_kv_size: Annotated[
        int | None, typer.Option(help="Keep only so many tokens in the KV cache.", min=1)
    ] = None,
    max_rows: Annotated[
        int | None, typer.Option(help="Sequences that a worker decodes together.", min=1)
    ] = None,
    max_inferences: Annotated[
        int,
        typer.Option(
            help="Replace a worker after so many finished answers, a tenth more or less; 0: never.",
            min=0,
        ),
    ] = 10_000,
    max_age: Annotated[
        float, typer.Option(help="Replace a worker after so many seconds; 0: never.", min=0)
    ] = 0.0,
    max_footprint: Annotated[
        float,
        typer.Option(help="Replace a worker that takes so many GB of memory; 0: never.", min=0),
    ] = 0.0,
    quarantine_ttl: Annotated[
        float,
        typer.Option(
            help="Refuse a request that workers died of for so many seconds; 0: never.", min=0
        ),
    ] = 3600.0,
    caffeinate: Annotated[
        bool,
        typer.Option(
            "--caffeinate/--no-caffeinate", help="On macOS, keep the machine awake meanwhile."
        ),
    ] = True,
    api_keys_file: Annotated[
        Path | None,
        typer.Option(
            help="A file of API keys that requests need; `mayfly keys new` adds to it. Keys can "
            "also stand in the environment, as MAYFLY_API_KEYS and MAYFLY_ADMIN_KEY.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let others use this server without a key.")
    ] = False,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API.

    Ctrl-C, SIGTERM or SIGHUP ends the server and everything it started.
    """
    _stop_as_ctrl_c_does()
    try:
        _require_mlx()
        state = state_directory(state_dir)
        front = {
            "api_keys_file": str(api_keys_file.resolve()) if api_keys_file else None,
            "insecure": insecure or None,
            "quarantine_ttl_s": quarantine_ttl,
        }
        locked = _locked(api_keys_file)
        _require_free(host, port, state, open_to_others=locked or insecure)
        options = {
            "adapter": str(adapter.resolve()) if adapter else None,
            "trust_remote_code": trust_remote_code or None,
            "kv_bits": kv_bits,
            "max_kv_size": max_kv_size,
            "max_rows": max_rows,
        }
        reporter = _reporter()
        try:
            fetched = _fetch(model, reporter)
            settings = _settings(
                fetched,
                name=name,
                workers=workers,
                lifetime=(max_inferences, max_age, int(max_footprint * 1e9)),
                options=_given(options),
                front_end=_front_end(host, port, _given(front)),
                state_dir=state,
                preload_blas=preload_blas,
                caffeinate=caffeinate,
            )
            status = _run(settings, reporter)
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


def _given(values: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in values.items() if value is not None}


def _locked(api_keys_file: Path | None) -> bool:
    """Whether the server will ask for keys. That they can't be used is better known at once."""
    import os

    from mayfly_server.edge.keys import KeysError, from_environment, read

    try:
        return bool(from_environment(os.environ)) or bool(api_keys_file and read(api_keys_file))
    except KeysError as error:
        fail(str(error))


def _require_free(host: str, port: int, state_dir: Path, *, open_to_others: bool) -> None:
    """The node takes both for itself when it starts; that it can't is better known before a
    download than after it."""
    from mayfly_reaper.errors import StartError
    from mayfly_reaper.front_end import listen
    from mayfly_reaper.paths import locked
    from mayfly_server.edge.exposure import exposed, refusal

    try:
        with locked(state_dir), listen(host, port) as listener:
            address = exposed(listener)
            if address is not None and not open_to_others:
                fail(refusal(address))
    except StartError as error:
        fail(str(error))


def _reporter() -> Reporter:
    """Bars where a person watches, lines elsewhere."""
    from mayfly_server.cli.progress import PlainLines, Reporter

    if sys.stdout.isatty():
        from rich.console import Console

        from mayfly_server.cli.bars import Bars

        return Reporter(Bars(Console()))
    return Reporter(PlainLines(typer.echo))


def _fetch(model: str | None, reporter: Reporter) -> Fetched:
    import platformdirs

    from mayfly_server.cli.fetching import FetchFailed, fetch

    cache = platformdirs.user_cache_path("mayfly")
    try:
        fetched = fetch(
            [*FETCH, "--cache", str(cache), "--", *([model] if model else [])], reporter.fetching
        )
    except FetchFailed as error:
        reporter.close()
        fail(str(error))
    reporter.fetched(fetched.name)
    return fetched


def _front_end(host: str, port: int, settings: dict[str, object]) -> FrontEnd:
    """``settings`` are fields of :class:`mayfly_server.config.FrontSettings`."""
    import json

    from mayfly_reaper.settings import FrontEnd

    command = (*FRONT_END, "--settings", json.dumps(settings))
    return FrontEnd(command=command, host=host, port=port)


def _settings(
    fetched: Fetched,
    *,
    name: str | None,
    workers: int,
    lifetime: tuple[int, float, int],
    options: dict[str, object],
    front_end: FrontEnd,
    state_dir: Path,
    preload_blas: bool,
    caffeinate: bool,
) -> NodeSettings:
    import socket

    from mayfly_reaper.settings import Lifetime, NodeSettings, Pool

    pool = Pool(
        model_name=name or fetched.name,
        model_path=fetched.path,
        workers=workers,
        options=options,
        lifetime=Lifetime(*lifetime),
    )
    return NodeSettings(
        node=socket.gethostname().partition(".")[0] or "localhost",
        state_dir=state_dir,
        pools=(pool,),
        front_end=front_end,
        preload_blas=preload_blas,
        caffeinate=caffeinate,
    )


def _run(settings: NodeSettings, reporter: Reporter) -> int:
    from mayfly_reaper.errors import StartError
    from mayfly_reaper.node import Node

    try:
        return Node(settings, reporter).run()
    except StartError as error:
        reporter.close()
        fail(str(error))
