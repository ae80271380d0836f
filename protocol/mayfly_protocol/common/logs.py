"""Logs of every process: one line per event, on stderr.

Lines are text for people, or JSON objects for programs (``--log-format json``). A line about a
request has the request's id: ``request_id``, the id that the client knows, or ``rid``, the id that
front ends and workers use; a line about a worker has its ``slot`` and its process number,
``incarnation``. Of libraries, only warnings and errors are logged.

No line holds prompts or answers, unless ``--log-prompts`` allows it. An exception's message may
quote the input that it could not handle, so an exception on behalf of a request, or in a library,
is logged without its message: only with its type and the place where it was raised.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
from collections.abc import Iterator
from typing import TextIO

import structlog
from structlog.types import EventDict, Processor

from mayfly_protocol.settings import LogSettings

OURS = ("mayfly_protocol", "mayfly_worker", "mayfly_reaper", "mayfly_server", "mayfly_cli")
MAX_LINE_CHARACTERS = 1000
MAX_QUOTED_CHARACTERS = 60
_REQUEST_FIELDS = ("request_id", "rid")
_QUOTATION = re.compile(r"""(?<!\w)(?<!File )(['"])(.*?)(?:\1(?!\w)|$)""")


def configure(settings: LogSettings, stream: TextIO | None = None, **always: object) -> None:
    """Sets up this process's log, on stderr or on ``stream``. The fields ``always`` are added to
    every line."""
    to = stream or sys.stderr
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_fields(always),
        _format_exceptions(messages=settings.prompts),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    render: list[Processor] = [structlog.processors.JSONRenderer()]
    if settings.form == "text":
        render = [_escape_controls, structlog.dev.ConsoleRenderer(colors=to.isatty())]
    handler = logging.StreamHandler(to)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in OURS:
        logging.getLogger(name).setLevel(settings.level.upper())


def format_without_messages(error: BaseException) -> str:
    """Formats the traceback of an exception and of the exceptions chained to it, with their types
    but without their messages, which may quote a prompt."""
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


def redacted(text: str) -> str:
    """Returns a text without quotations long enough to be a user's text, and with each line cut to
    ``MAX_LINE_CHARACTERS``."""
    lines = (line[:MAX_LINE_CHARACTERS] for line in text.split("\n"))
    return "\n".join(_QUOTATION.sub(_shortened, line) for line in lines)


def _shortened(quotation: re.Match[str]) -> str:
    length = len(quotation[2])
    return quotation[0] if length <= MAX_QUOTED_CHARACTERS else f"'({length} characters)'"


def _chain(error: BaseException) -> Iterator[tuple[BaseException, str]]:
    """Yields an exception and the exceptions chained to it, the earliest first, each with the text
    that Python prints between it and the next exception of the chain."""
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


def _add_fields(always: dict[str, object]) -> Processor:
    def add(logger: object, method: str, event: EventDict) -> EventDict:
        return {**always, **event}

    return add


def _escape_controls(logger: object, method: str, event: EventDict) -> EventDict:
    """Writes control characters in a line's texts as escapes, since a terminal would obey them;
    JSON has them escaped by itself. Tracebacks keep their line ends."""
    return {
        name: _escaped(value, keep="\n" if name == "exception" else "")
        if isinstance(value, str)
        else value
        for name, value in event.items()
    }


def _escaped(text: str, keep: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def _format_exceptions(*, messages: bool) -> Processor:
    """Makes the log processor that turns the ``exc_info`` of a log line into a traceback; without
    ``messages``, the traceback lacks the messages of exceptions that may quote a prompt."""

    def explain(logger: object, method: str, event: EventDict) -> EventDict:
        error = _exception_of(event.pop("exc_info", None))
        if error is None:
            return event
        ours = str(event.get("logger", "")).startswith(OURS)
        if messages or (ours and not any(name in event for name in _REQUEST_FIELDS)):
            event["exception"] = "".join(traceback.format_exception(error)).rstrip()
        else:
            event["exception"] = format_without_messages(error)
        return event

    return explain


def _exception_of(exc_info: object) -> BaseException | None:
    """Returns the exception that a log call's ``exc_info`` stands for; ``exc_info`` is an
    exception, a tuple of ``sys.exc_info``, or True for the exception that is being handled."""
    if isinstance(exc_info, tuple):
        exc_info = exc_info[1]
    if isinstance(exc_info, BaseException):
        return exc_info
    return sys.exc_info()[1] if exc_info else None
