"""Fields of a request's body that are not known to the API that the request is for.

An unknown field that is null or empty asks for nothing, so it is accepted and ignored. A hint (a
mark where to cache, or a provider's metadata) is ignored, too. Any other unknown field at the top
level of a body is also ignored, but not silently: the answer's header ``mayfly-ignored`` names the
field, and so does the log, once a day. With the setting ``strict_fields``, requests with such
fields are refused instead. Below the top level, unknown fields that are neither empty nor hints are
always refused (:class:`mayfly_server.api.request_fields.Strict`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import structlog
from pydantic import BaseModel
from starlette.types import Scope

HINTS = frozenset(
    {
        "cache_control",
        "copilot_cache_control",
        "extra_content",
        "prompt_cache_breakpoint",
        "provider_metadata",
        "provider_options",
        "provider_specific_fields",
        "providerMetadata",
        "providerOptions",
    }
)
"""Names of fields that clients and gateways put at any place of a body, and that change no answer;
they are ignored without notice."""

LOG_INTERVAL_S = 24 * 3600.0
MAX_LOGGED = 256
"""Largest number of field names that are remembered as logged. Without a limit, clients could fill
the memory, since they choose the names."""

MAX_LENGTH = 64
"""Largest length, in characters, of an ignored field's name that the header and the log repeat."""

_log = structlog.get_logger(__name__)


def asks_nothing(value: Any) -> bool:
    """True if a field's value is null or empty, so that the field can be treated as absent."""
    return value is None or value == "" or value == [] or value == {}


@cache
def field_names(model: type[BaseModel]) -> frozenset[str]:
    """The names that the fields of a pydantic model have in JSON."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


class IgnoredFieldsLog:
    """Logs the names of request fields that were ignored, each name at most once a day."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged: dict[str, float] = {}

    def note(self, name: str) -> None:
        now = self._clock()
        if now - self._logged.get(name, -LOG_INTERVAL_S) < LOG_INTERVAL_S:
            return
        if len(self._logged) >= MAX_LOGGED:
            self._logged = {
                name: at for name, at in self._logged.items() if now - at < LOG_INTERVAL_S
            }
        if len(self._logged) < MAX_LOGGED or name in self._logged:
            self._logged[name] = now
            _log.warning("unknown field of a request ignored", field=name)


def take_unknown(
    body: dict[str, Any], known: Collection[str], scope: Scope, log: IgnoredFieldsLog
) -> None:
    """Removes from a request's body all fields whose names are not ``known``. Fields that are
    neither empty nor hints are named in the answer's header ``mayfly-ignored`` and in the log."""
    for name in [name for name in body if name not in known]:
        value = body.pop(name)
        if name not in HINTS and not asks_nothing(value):
            note_ignored(name, scope, log)


def note_ignored(name: str, scope: Scope, log: IgnoredFieldsLog) -> None:
    """Names an ignored field in the answer's header ``mayfly-ignored`` and in the log. A name that
    is no identifier, so that no field of an API could have it, may be a part of the client's
    content and is replaced by ``?``."""
    safe = name if name.isascii() and name.isidentifier() and len(name) <= MAX_LENGTH else "?"
    names: list[str] = scope.setdefault("state", {}).setdefault("ignored", [])
    if safe not in names:
        names.append(safe)
    log.note(safe)
