"""From keys to what the parts of a server are told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from mayfly_cli.config.keys import ModelTable, ServerKeys
from mayfly_cli.config.loading import ConfigurationError
from mayfly_protocol.settings import LogFormat, LogLevel, LogSettings
from mayfly_reaper.settings import Budgets, Lifetime, Pool

_GB = 10**9


@dataclass(frozen=True)
class Model:
    """One to serve: its table, and where fetching has put it."""

    table: ModelTable
    path: Path
    fetched_name: str

    @property
    def name(self) -> str:
        return self.table.name or self.fetched_name


def pool(model: Model) -> Pool:
    keys = model.table
    options: dict[str, object] = {
        "adapter": str(keys.adapter.expanduser().resolve()) if keys.adapter else None,
        "trust_remote_code": keys.trust_remote_code,
        "kv_bits": keys.kv_bits,
        "max_kv_size": keys.max_kv_size,
        "max_rows": keys.max_rows,
        "max_waiting": keys.max_waiting,
        "kv_budget": _bytes(keys.kv_budget),
        "prefix_cache": _bytes(keys.prefix_cache),
        "memory_limit": _bytes(keys.memory_limit),
    }
    return Pool(
        model_name=model.name,
        model_path=model.path,
        workers=keys.workers,
        options=options,
        lifetime=Lifetime(keys.max_inferences, keys.max_age, _bytes(keys.max_footprint)),
    )


def budgets(keys: ServerKeys) -> Budgets:
    return Budgets(
        load_still_s=keys.load_budget,
        silent_s=keys.silent_budget,
        prefill_s=keys.prefill_budget,
        decode_s=keys.decode_budget,
        drain_s=keys.drain_grace,
        stop_s=keys.stop_grace,
        retry_max_s=keys.retry_max,
    )


def logs(keys: ServerKeys) -> LogSettings:
    return LogSettings(
        cast(LogFormat, keys.log_format), cast(LogLevel, keys.log_level), prompts=keys.log_prompts
    )


def front_settings(keys: ServerKeys, aliases: dict[str, str]) -> dict[str, Any]:
    """Fields of :class:`mayfly_server.settings.FrontSettings`, as JSON has them. ``aliases`` are
    other names of models."""
    keys_file = keys.api_keys_file
    return {
        "aliases": aliases,
        "api_keys_file": str(keys_file.expanduser().resolve()) if keys_file else None,
        "insecure": keys.insecure,
        "allowed_hosts": keys.allowed_hosts,
        "cors_origins": keys.cors_origins,
        "metrics": keys.metrics,
        "logs": asdict(logs(keys)),
        "queue_wait_s": keys.queue_wait,
        "failover_wait_s": keys.failover_wait,
        "max_attempts": keys.max_attempts,
        "request_timeout_s": keys.request_timeout,
        "quarantine_ttl_s": keys.quarantine_ttl,
        "keep_alive_s": keys.keep_alive,
        "max_unread_bytes": keys.max_unread_bytes,
        "max_body_bytes": keys.max_body_bytes,
        "connections": {
            "max_connections": keys.max_connections,
            "max_head_bytes": keys.max_head_bytes,
            "max_headers": keys.max_headers,
            "max_address_bytes": keys.max_address_bytes,
            "head_wait_s": keys.head_wait,
            "body_wait_s": keys.body_wait,
            "slow_reader_s": keys.slow_reader,
        },
    }


def aliases_by_path(tables: Iterable[ModelTable]) -> dict[str, str]:
    """Each alias's model as its nodes call it, for a front end that has fetched none: by its name,
    or by the last part of its path."""
    return {
        alias: table.name or table.path.rstrip("/").rpartition("/")[2]
        for table in tables
        for alias in table.aliases
    }


def aliases_of(models: Iterable[Model]) -> dict[str, str]:
    """Each alias's model. Raises ConfigurationError where a name would mean two models."""
    models = list(models)
    names = [*(model.name for model in models)]
    names += [alias for model in models for alias in model.table.aliases]
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigurationError(
                f"{count} models would be called {name!r}: give each a name of its own, "
                "as name = ... in its [[models]] table"
            )
    return {alias: model.name for model in models for alias in model.table.aliases}


def _bytes(gigabytes: float) -> int:
    return int(gigabytes * _GB)
