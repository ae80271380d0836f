"""Settings of a worker process, which its supervisor (the reaper) passes to it, and settings of the
log of every process."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from mayfly_protocol.options import Option, absolute_text, size

if TYPE_CHECKING:
    from pydantic import TypeAdapter

PEER_TIMEOUT_S = 10.0
"""Seconds of silence after which a worker and a front end count each other as gone."""

LogFormat = Literal["text", "json"]
GenerationConfig = Literal["auto", "none"]
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
            guarded=True,
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of a worker process, which its supervisor (the reaper) passes as JSON on the command
    line.

    ``model_path`` is a local folder: the model was downloaded before. Sizes are bytes, times
    seconds; 0 means "choose for me" where a default depends on the machine or the model.
    """

    slot: str
    incarnation: int
    control: str
    """Address of the reaper's ROUTER socket, to which the worker sends its heartbeats."""
    listen: str
    """Address that the worker binds for front ends: an ``ipc://`` path that no other worker process
    ever used, or ``tcp://HOST:FIRST-LAST`` for any free port of a range."""
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
    trust_remote_code: Annotated[
        bool, Option("Run Python code that comes with the model.", guarded=True)
    ] = False
    generation_config: Annotated[
        GenerationConfig,
        Option(
            "Sampling of requests that name none: as the model's generation_config.json "
            "recommends (auto), or temperature 1 (none)."
        ),
    ] = "auto"
    tool_parser: Annotated[
        str,
        Option(
            "Form in which the model writes tool calls: as its chat template suggests (auto), a "
            "name such as hermes or llama3_json, or none to leave calls in the text. A name that "
            "does not exist is answered with the list."
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Option(
            "Form in which the model writes thoughts: as its chat template suggests (auto), a name "
            "such as qwen3, mistral or granite, or none to leave thoughts in the text. A name that "
            "does not exist is answered with the list."
        ),
    ] = "auto"
    context: Annotated[
        int,
        Option(
            "Longest prompt with its answer, in tokens; 0: what the model's configuration names.",
            at_least=0,
            aliases=("--max-model-len",),
        ),
    ] = 0
    kv_bits: Annotated[
        int | None,
        Option("Quantize the KV cache to this number of bits.", one_of=(2, 3, 4, 5, 6, 8)),
    ] = None
    """Bits per value of a quantized KV cache, one of the widths that MLX has; None: not
    quantized."""
    kv_group_size: Annotated[
        int | None,
        Option(
            "Quantize the KV cache in groups of this number of values; by default 64, or 32 where "
            "64 does not divide the width of the model's heads.",
            one_of=(32, 64, 128),
        ),
    ] = None
    max_kv_size: Annotated[
        int | None,
        Option(
            "Keep at most this number of tokens in the KV cache: the first 4 of a conversation, "
            "and its last ones.",
            at_least=16,
        ),
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
    """Part of the machine's memory for this worker, from 0 to 1: the node's workers have equal
    shares."""
    prefill_alone_s: float = 1.0
    """Target duration of a prefill chunk, in seconds, while no sequence decodes."""
    prefill_shared_s: float = 0.25
    """Target duration of a prefill chunk, in seconds, while other sequences wait for their next
    token."""
    beat_interval_s: float = 0.5
    orphan_grace_s: float = 30.0
    canary_dir: str = ""
    """Folder that keeps the expected answers of the canary (the prompt with which a worker tests
    itself) and further facts about the model; if empty, only the process's memory keeps them."""
    canary_interval_s: float = 300.0
    """Idle seconds after which a worker tests itself again with a fixed prompt, the canary."""
    breadcrumb: str = ""
    """File in which the worker notes the requests of each forward pass before it begins; empty for
    none."""
    trusted: str = ""
    """File of the public keys of the front ends that may connect; if set, the worker accepts CURVE
    connections only."""
    logs: LogSettings = field(default_factory=LogSettings)


@cache
def worker_settings() -> TypeAdapter[WorkerSettings]:
    """Returns the pydantic adapter that reads and writes a worker's settings as JSON."""
    from pydantic import TypeAdapter

    return TypeAdapter(WorkerSettings)
