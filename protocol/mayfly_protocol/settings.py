"""Settings of a worker process, which the reaper passes to it, and of every process's log."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from mayfly_protocol.options import Option, absolute_text, size

if TYPE_CHECKING:
    from pydantic import TypeAdapter

PEER_TIMEOUT_S = 10.0
"""Silence after which a worker and a front end take each other for gone."""

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Settings of a process's log."""

    form: Annotated[
        LogFormat,
        Option("Format of the log: text for people, or JSON objects.", name="log_format"),
    ] = "text"
    level: Annotated[
        LogLevel, Option("Lowest level of Mayfly's own log lines.", name="log_level")
    ] = "info"
    prompts: Annotated[
        bool,
        Option(
            "Allow prompts and answers in the log; without it no log line holds any of their text.",
            name="log_prompts",
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of a worker process, passed as JSON on its command line.

    ``model_path`` is a local folder: the model has been fetched before. Sizes are bytes, times
    seconds; 0 means "choose for me" where a default depends on the machine or the model.
    """

    slot: str
    incarnation: int
    control: str
    """Address of the reaper's ROUTER socket."""
    listen: str
    """Address to bind: an ``ipc://`` path that no other incarnation ever used, or
    ``tcp://HOST:FIRST-LAST`` for any free port of a range."""
    model_path: str
    model_name: str
    adapter: Annotated[
        str | None,
        Option(
            "A folder with a LoRA adapter.",
            exists="folder",
            type=Path,
            convert=absolute_text,
        ),
    ] = None
    trust_remote_code: Annotated[bool, Option("Run Python code that comes with the model.")] = False
    kv_bits: Annotated[
        int | None,
        Option("Quantize the KV cache to this number of bits.", one_of=(2, 3, 4, 5, 6, 8)),
    ] = None
    """MLX quantizes to these widths only."""
    max_kv_size: Annotated[
        int | None, Option("Keep at most this number of tokens in the KV cache.", at_least=1)
    ] = None
    max_rows: Annotated[
        int,
        Option(
            "Sequences that a worker decodes together, in one batch.",
            at_least=1,
            aliases=("--max-num-seqs",),
        ),
    ] = 32
    max_waiting: Annotated[
        int, Option("Requests that may wait in a worker's queue.", at_least=1)
    ] = 256
    kv_budget: Annotated[
        int, size("GB that the KV caches of running sequences may take; 0: what fits.")
    ] = 0
    prefix_cache: Annotated[
        int,
        size("GB of KV caches kept for later prompts that begin alike; 0: what fits."),
    ] = 0
    memory_limit: Annotated[
        int, size("GB that MLX may take in a worker; 0: an equal share of the machine's memory.")
    ] = 0
    memory_share: float = 1.0
    """Part of the machine's memory for this worker: workers share it equally."""
    prefill_alone_s: float = 1.0
    """Target duration of a prefill chunk while no sequence decodes."""
    prefill_shared_s: float = 0.25
    """Target duration of a prefill chunk while other sequences wait for their next token."""
    beat_interval_s: float = 0.5
    orphan_grace_s: float = 30.0
    canary_dir: str = ""
    """Folder that keeps the canary's expected answers and further facts about the model; empty:
    they are kept in this process alone."""
    canary_interval_s: float = 300.0
    """Idle seconds after which the canary runs again."""
    breadcrumb: str = ""
    """File in which the worker notes what each forward pass is about; empty for none."""
    trusted: str = ""
    """File of the keys that may connect; with one, the worker accepts CURVE connections only."""
    logs: LogSettings = field(default_factory=LogSettings)


@cache
def worker_settings() -> TypeAdapter[WorkerSettings]:
    """Returns the reader and writer of a worker's settings as JSON."""
    from pydantic import TypeAdapter

    return TypeAdapter(WorkerSettings)
