"""How one worker is configured: what the reaper hands to the process it spawns."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import TypeAdapter

from mayfly_protocol.common.logs import LogSettings


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Everything a worker process is told, as JSON on its command line.

    ``model_path`` is a local folder: fetching happened before. Sizes are bytes, times seconds,
    0 means "choose for me" where a default depends on the machine or the model.
    """

    slot: str
    incarnation: int
    control: str
    """The reaper's ROUTER."""
    listen: str
    """Where to bind: an ``ipc://`` path that no other incarnation ever used, or
    ``tcp://HOST:FIRST-LAST``, any free port of a range."""
    model_path: str
    model_name: str
    adapter: str | None = None
    trust_remote_code: bool = False
    kv_bits: int | None = None
    max_kv_size: int | None = None
    max_rows: int = 32
    """Rows that decode together."""
    max_waiting: int = 256
    """Requests queued beyond those that run."""
    kv_budget: int = 0
    """Bytes of KV cache that running rows may take."""
    prefix_cache: int = 0
    """Bytes of KV cache kept for prompts to come."""
    memory_limit: int = 0
    """Bytes that MLX may take; 0: this worker's share of what the device recommends."""
    memory_share: float = 1.0
    """The part of the machine's memory that is this worker's: workers share it equally."""
    prefill_alone_s: float = 1.0
    """Aim for a prefill chunk's time while nothing decodes ..."""
    prefill_shared_s: float = 0.25
    """... and while others wait for their next token."""
    beat_interval_s: float = 0.5
    orphan_grace_s: float = 30.0
    canary_dir: str = ""
    """Where the canary's right answers, and what else was found out about the model, are kept;
    empty: with this process alone."""
    canary_interval_s: float = 300.0
    """Idle seconds after which the canary sings again."""
    breadcrumb: str = ""
    """The file that says what each forward pass is about; empty for none."""
    trusted: str = ""
    """The file of the keys that may connect; with one, the worker speaks CURVE alone."""
    logs: LogSettings = field(default_factory=LogSettings)


worker_settings: TypeAdapter[WorkerSettings] = TypeAdapter(WorkerSettings)
