"""What every process writes of what happens to it: one line an event, on stderr.

Lines are for people, or JSON objects for programs (``--log-format json``). A line about a request
has its id (``request_id``, as the client knows it, or ``rid``, as workers do), one about a worker
its ``slot`` and ``incarnation``. Libraries' own lines come through here too, from WARNING on.

No line holds what somebody asked or was answered, unless ``--log-prompts`` wants it so. An
exception's own words may quote what it could not handle, so one that was met on behalf of a
request, or by a library for whatever reason, is logged without them: its type and where it was
raised are nobody's secret.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterator
from typing import TextIO

import structlog
from structlog.types import EventDict, Processor

from mayfly_protocol.settings import LogSettings

OURS = ("mayfly_protocol", "mayfly_worker", "mayfly_reaper", "mayfly_server", "mayfly_cli")
_OF_A_REQUEST = ("request_id", "rid")


def configure(settings: LogSettings, stream: TextIO | None = None, **always: object) -> None:
    """From now on this process logs as the settings say, to stderr or to another ``stream``.
    ``always`` stands in every line."""
    to = stream or sys.stderr
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _adding(always),
        _with_exceptions(words=settings.prompts),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    render: Processor = structlog.processors.JSONRenderer()
    if settings.form == "text":
        render = structlog.dev.ConsoleRenderer(colors=to.isatty())
    handler = logging.StreamHandler(to)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in OURS:
        logging.getLogger(name).setLevel(settings.level.upper())


def without_words(error: BaseException) -> str:
    """A traceback in which no exception says anything but its type."""
    return "".join(
        line
        for each, link in _chain(error)
        for line in (
            "Traceback (most recent call last):\n",
            *traceback.format_tb(each.__traceback__),
            f"{type(each).__qualname__}\n",
            link,
        )
    ).rstrip()


def _chain(error: BaseException) -> Iterator[tuple[BaseException, str]]:
    """The exceptions behind one, the first first, each with what Python says between it and the
    next."""
    chain: list[tuple[BaseException, str]] = [(error, "")]
    seen = {id(error)}
    while True:
        last = chain[-1][0]
        if last.__cause__ is not None:
            before: BaseException | None = last.__cause__
            link = "\nThe above exception was the direct cause of the following exception:\n\n"
        else:
            before = None if last.__suppress_context__ else last.__context__
            link = "\nDuring handling of the above exception, another exception occurred:\n\n"
        if before is None or id(before) in seen:
            return reversed(chain)
        seen.add(id(before))
        chain.append((before, link))


def _adding(always: dict[str, object]) -> Processor:
    def add(logger: object, method: str, event: EventDict) -> EventDict:
        return {**always, **event}

    return add


def _with_exceptions(*, words: bool) -> Processor:
    """Turns ``exc_info`` into text."""

    def explain(logger: object, method: str, event: EventDict) -> EventDict:
        error = _error(event.pop("exc_info", None))
        if error is None:
            return event
        ours = str(event.get("logger", "")).startswith(OURS)
        if words or (ours and not any(name in event for name in _OF_A_REQUEST)):
            event["exception"] = "".join(traceback.format_exception(error)).rstrip()
        else:
            event["exception"] = without_words(error)
        return event

    return explain


def _error(told: object) -> BaseException | None:
    """What ``exc_info`` means: an exception, what ``sys.exc_info`` gives, or True."""
    if isinstance(told, tuple):
        told = told[1]
    if isinstance(told, BaseException):
        return told
    return sys.exc_info()[1] if told else None
