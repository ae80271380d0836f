"""Fields of a request's body that no API here knows.

One that is null or empty asks for nothing, and is taken. So is a hint: a mark where to cache, or a
provider's metadata. Any other unknown field at the top of a body is left out as well, but never
silently: the answer's header ``mayfly-ignored`` names it, and the log does so once a day. The
setting ``strict_fields`` has those refused instead. Within objects, unknown fields that are
neither empty nor hints are always refused
(:class:`mayfly_server.api.request_fields.Strict`).
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
"""Fields that clients and gateways put anywhere, and that change no answer."""

LOG_INTERVAL_S = 24 * 3600.0
MAX_LOGGED = 256
"""Names that are remembered as logged, since clients choose them."""

MAX_LENGTH = 64
"""Characters of a field's name that is repeated."""

_log = structlog.get_logger(__name__)


def asks_nothing(value: Any) -> bool:
    """Tells whether a value is null or empty, so that a field with it can be taken as absent."""
    return value is None or value == "" or value == [] or value == {}


@cache
def field_names(model: type[BaseModel]) -> frozenset[str]:
    """The names that the fields of a model have in JSON."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


class IgnoredFieldsLog:
    """Logs the name of an ignored field, at most once a day."""

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
    """Removes a body's unknown fields, and notes those that ask for something."""
    for name in [name for name in body if name not in known]:
        value = body.pop(name)
        if name not in HINTS and not asks_nothing(value):
            note_ignored(name, scope, log)


def note_ignored(name: str, scope: Scope, log: IgnoredFieldsLog) -> None:
    """Has the answer's header and the log name a field. A name that no field of an API could have,
    because it is no identifier, may be a part of the client's content and is not repeated."""
    safe = name if name.isascii() and name.isidentifier() and len(name) <= MAX_LENGTH else "?"
    names: list[str] = scope.setdefault("state", {}).setdefault("ignored", [])
    if safe not in names:
        names.append(safe)
    log.note(safe)
