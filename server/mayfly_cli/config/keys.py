"""Everything that can be set about a server.

A key ``max_rows`` is the option ``--max-rows``, the variable ``MAYFLY_MAX_ROWS`` and a line of
``mayfly.toml``. Times are seconds. This module is read whenever ``mayfly`` starts, so it imports
nothing that takes long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_type_hints

from annotated_types import Ge, Le
from typing_extensions import Doc

KV_WIDTHS = (2, 3, 4, 5, 6, 8)
"""The widths that MLX quantizes to."""
HOST = r"\*|(\*\.)?[A-Za-z0-9_.-]+|(?=.*:.*:)[0-9A-Fa-f:.]+"
ORIGIN = r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\sA-Z]+"
METRICS = ("admin", "open", "off")
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class Exists:
    """Marks a path that has to be there."""

    folder: bool


@dataclass(frozen=True)
class OneOf:
    """Marks what takes a few values only."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class Like:
    """Marks texts that are compared with what clients send, and that match nothing in any other
    form than ``pattern``'s."""

    pattern: str
    example: str


@dataclass(frozen=True)
class Called:
    """Marks a list whose option, which is given once for each, has a name of its own."""

    option: str


Count = Annotated[int, Ge(1)]
Gigabytes = Annotated[float, Ge(0)]
Seconds = Annotated[float, Ge(0)]
Patience = Annotated[float, Ge(0.1)]
"""Seconds with a client, which cannot be none at all."""
Budget = Annotated[float, Ge(1)]
"""Seconds that a worker may take without being lost."""


@dataclass(frozen=True, kw_only=True)
class ModelKeys:
    """What may differ from model to model: outside of ``[[models]]``, what holds for all of them
    that say nothing else."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "allow_inf_nan": False}

    workers: Annotated[Count, Doc("Worker processes, each with the model.")] = 1
    adapter: Annotated[Path | None, Exists(folder=True), Doc("A folder with a LoRA adapter.")] = (
        None
    )
    trust_remote_code: Annotated[bool, Doc("Run Python code that comes with the model.")] = False
    kv_bits: Annotated[
        int | None, OneOf(KV_WIDTHS), Doc("Quantize the KV cache to so many bits.")
    ] = None
    max_kv_size: Annotated[int | None, Ge(1), Doc("Keep only so many tokens in the KV cache.")] = (
        None
    )
    max_rows: Annotated[Count, Doc("Sequences that a worker decodes together.")] = 32
    max_waiting: Annotated[Count, Doc("Requests that may wait in a worker's queue.")] = 256
    kv_budget: Annotated[
        Gigabytes, Doc("GB that the KV caches of running sequences may take; 0: what fits.")
    ] = 0.0
    prefix_cache: Annotated[
        Gigabytes, Doc("GB of KV caches kept for prompts to come; 0: what fits.")
    ] = 0.0
    memory_limit: Annotated[
        Gigabytes, Doc("GB that MLX may take in a worker; 0: an equal share of what there is.")
    ] = 0.0
    max_inferences: Annotated[
        int,
        Ge(0),
        Doc("Replace a worker after so many finished answers, a tenth more or less; 0: never."),
    ] = 10_000
    max_age: Annotated[Seconds, Doc("Replace a worker after so many seconds; 0: never.")] = 0.0
    max_footprint: Annotated[
        Gigabytes, Doc("Replace a worker that takes so many GB of memory; 0: never.")
    ] = 0.0


@dataclass(frozen=True, kw_only=True)
class ModelTable(ModelKeys):
    """One of the ``[[models]]``, with what it leaves out taken from outside."""

    path: Annotated[str, Doc("The model's folder or Hugging Face repository id.")]
    name: Annotated[str | None, Doc("What clients call the model; by default its own name.")] = None
    aliases: Annotated[tuple[str, ...], Doc("Other names that requests may use.")] = ()


@dataclass(frozen=True, kw_only=True)
class ServerKeys(ModelKeys):
    """All keys, with their defaults."""

    model: Annotated[
        str | None,
        Doc(
            "A model's folder or Hugging Face repository id. Without one a small demo model is "
            "served."
        ),
    ] = None
    name: Annotated[str | None, Doc("What clients call the model; by default its own name.")] = None
    aliases: Annotated[tuple[str, ...], Doc("Other names of the model that requests may use.")] = ()
    models: Annotated[
        tuple[ModelTable, ...],
        Doc("Several models instead of one: [[models]] tables in the file, elsewhere JSON."),
    ] = ()

    host: Annotated[str, Doc("The address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Ge(0), Le(65535), Doc("The port to listen on; 0: any.")] = 8000
    state_dir: Annotated[
        Path | None,
        Doc(
            "Where this server keeps its state; each server needs its own. By default the "
            "platform's state directory."
        ),
    ] = None

    nodes: Annotated[
        tuple[str, ...],
        Called("--node"),
        Doc(
            "A node whose workers are used: tcp://KEY@HOST:PORT, with the KEY that `mayfly keys "
            "show` prints there."
        ),
    ] = ()
    control_host: Annotated[str, Doc("The address where front ends reach this node.")] = "127.0.0.1"
    control_port: Annotated[
        int, Ge(1), Le(65534), Doc("The port where they do; the next one is used, too.")
    ] = 7700
    worker_ports: Annotated[str, Doc("The ports of this node's workers, one for each.")] = (
        "7710-7799"
    )

    api_keys_file: Annotated[
        Path | None,
        Exists(folder=False),
        Doc(
            "A file of API keys that requests need; `mayfly keys new` adds to it. Keys can also "
            "stand in the environment, as MAYFLY_API_KEYS and MAYFLY_ADMIN_KEY."
        ),
    ] = None
    insecure: Annotated[bool, Doc("Let others use this server without a key.")] = False
    allowed_hosts: Annotated[
        tuple[str, ...],
        Like(HOST, "mac.example.com"),
        Doc("Host names that requests may be for, beside this machine's own; * is any."),
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        Like(ORIGIN, "https://app.example.com"),
        Doc("Origins of web pages that may use this server; * is any."),
    ] = ()
    metrics: Annotated[
        str,
        OneOf(METRICS),
        Doc("Who may read /metrics once there are keys: those with an admin's, all, or nobody."),
    ] = "admin"
    metrics_port: Annotated[
        int | None,
        Ge(1),
        Le(65535),
        Doc("Serve the metrics of reaper and workers on this port, too; /metrics holds them."),
    ] = None
    metrics_host: Annotated[
        str, Doc("The address for that. The metrics can be read there by everyone, without a key.")
    ] = "127.0.0.1"
    max_body_bytes: Annotated[int, Ge(1024), Doc("The largest request body.")] = 32 << 20
    max_connections: Annotated[Count, Doc("Connections at a time.")] = 4096
    max_head_bytes: Annotated[
        int, Ge(1024), Doc("The largest address and headers of a request, together.")
    ] = 32 << 10
    max_headers: Annotated[int, Ge(16), Doc("Headers that a request may have.")] = 128
    max_address_bytes: Annotated[int, Ge(256), Doc("The longest address of a request.")] = 8 << 10
    head_wait: Annotated[Patience, Doc("Seconds that a request's headers may take to arrive.")] = (
        10.0
    )
    body_wait: Annotated[
        Patience,
        Doc("Seconds that its body may take, and one more for each 10 kB that came."),
    ] = 30.0
    slow_reader: Annotated[
        Patience, Doc("Seconds after which a client that does not read is cut.")
    ] = 60.0

    queue_wait: Annotated[
        Seconds, Doc("Seconds that a request waits for a worker that is being loaded.")
    ] = 30.0
    failover_wait: Annotated[
        Seconds, Doc("Seconds that one whose worker was lost waits for another.")
    ] = 120.0
    max_attempts: Annotated[Count, Doc("Workers that a request may outlive.")] = 5
    request_timeout: Annotated[
        Seconds, Doc("Seconds that a request may take in all; 0: as many as it likes.")
    ] = 3600.0
    quarantine_ttl: Annotated[
        Seconds,
        Doc("Refuse a request that workers died of for so many seconds; 0: never."),
    ] = 3600.0
    keep_alive: Annotated[Patience, Doc("Seconds after which a silent stream gets a comment.")] = (
        10.0
    )
    max_unread_bytes: Annotated[
        int, Ge(65536), Doc("What may wait for a client that does not read its stream.")
    ] = 4 << 20

    log_format: Annotated[
        str, OneOf(LOG_FORMATS), Doc("Log lines for people, or JSON objects for programs.")
    ] = "text"
    log_level: Annotated[str, OneOf(LOG_LEVELS), Doc("What is worth a line in the log.")] = "info"
    log_prompts: Annotated[bool, Doc("Log what is asked. Otherwise no line holds any of it.")] = (
        False
    )

    stop_grace: Annotated[
        Seconds, Doc("Seconds that running requests may take when the server stops.")
    ] = 5.0
    drain_grace: Annotated[
        Seconds, Doc("Seconds that they may take in a worker that is replaced.")
    ] = 30.0
    silent_budget: Annotated[
        Budget, Doc("Seconds without a word after which a worker is lost.")
    ] = 5.0
    load_budget: Annotated[Budget, Doc("Seconds that a load may stand still.")] = 120.0
    prefill_budget: Annotated[Budget, Doc("Seconds that one chunk of a prompt may take.")] = 30.0
    decode_budget: Annotated[Budget, Doc("Seconds that one step may take.")] = 20.0
    retry_max: Annotated[
        float, Ge(1), Doc("The longest pause, in seconds, before a lost worker is replaced.")
    ] = 300.0
    preload_blas: Annotated[
        bool,
        Doc("On Linux without a GPU, preload a shared OpenBLAS into workers if there is one."),
    ] = True
    caffeinate: Annotated[bool, Doc("On macOS, keep the machine awake meanwhile.")] = True


@dataclass(frozen=True)
class Key:
    """One field of the above. ``type`` is its type without None; ``optional`` says that None is
    its default."""

    name: str
    type: Any
    optional: bool
    default: Any
    doc: str
    least: float | None
    most: float | None
    one_of: tuple[Any, ...] | None
    exists: Exists | None
    like: Like | None
    called: str | None

    @property
    def option(self) -> str:
        return self.called or "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "MAYFLY_" + self.name.upper()

    @property
    def several(self) -> bool:
        return bool(self.type == tuple[str, ...])


def _keys_of(table: type[ModelKeys]) -> dict[str, Key]:
    """The keys of one of the classes above, by name, in their order."""
    hints = get_type_hints(table, include_extras=True)
    own_first = [*fields(ServerKeys)[len(fields(ModelKeys)) :], *fields(ModelKeys)]
    order = own_first if table is ServerKeys else fields(table)
    return {field.name: _key(field.name, field.default, hints[field.name]) for field in order}


def _key(name: str, default: Any, hint: Any) -> Key:
    whole: Any = hint.__origin__
    marks: tuple[Any, ...] = hint.__metadata__
    members = [m for m in getattr(whole, "__args__", ()) if m is not type(None)]
    optional = type(None) in getattr(whole, "__args__", ())

    def mark(kind: Any, attribute: str) -> Any:
        found = next((m for m in marks if isinstance(m, kind)), None)
        return getattr(found, attribute) if found is not None else None

    return Key(
        name=name,
        type=members[0] if optional else whole,
        optional=optional,
        default=default,
        doc=mark(Doc, "documentation"),
        least=mark(Ge, "ge"),
        most=mark(Le, "le"),
        one_of=mark(OneOf, "values"),
        exists=next((m for m in marks if isinstance(m, Exists)), None),
        like=next((m for m in marks if isinstance(m, Like)), None),
        called=mark(Called, "option"),
    )


SHARED: Mapping[str, Key] = _keys_of(ModelKeys)
TABLE: Mapping[str, Key] = _keys_of(ModelTable)
"""Those of one of the ``[[models]]``."""
SERVER: Mapping[str, Key] = _keys_of(ServerKeys)
"""All that stand outside of the tables."""


def _from(first: str, last: str) -> tuple[str, ...]:
    names = tuple(SERVER)
    return names[names.index(first) : names.index(last) + 1]


_REMOTE = _from("control_host", "worker_ports")
_METRICS = _from("metrics_port", "metrics_host")
_HTTP = {"host", "port", *_from("api_keys_file", "max_unread_bytes")} - {*_METRICS}
_WORKERS = (*_from("model", "models"), *_from("drain_grace", "caffeinate"), *SHARED)
_BOTH = ("state_dir", *_from("log_format", "stop_grace"))

COMMANDS: Mapping[str, frozenset[str]] = {
    "serve": frozenset(SERVER) - {"nodes", *_REMOTE},
    "node": frozenset({*_REMOTE, *_WORKERS, *_METRICS, *_BOTH}),
    "front": frozenset({"nodes", "models", *_HTTP, *_BOTH}),
}
"""The keys that mean something to a command. In a file all may stand: several commands share it."""
