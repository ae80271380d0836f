"""Exceptions in the order in which they happened.

Python hands over the last exception of a chain, and what led to it hangs behind::

    raised last  --__cause__, __context__-->  ...  -->  raised first
        |
        '--exceptions (of a group)-->  raised before the group was made

The first is the truth about a fault. What cleanup raises afterwards is kept, but apart: it must
never stand where the first belongs.
"""

from __future__ import annotations

import traceback

from mayfly_protocol.lifecycle import Cause

MAX_TEXT = 4_000
"""Characters of one message."""
MAX_TRACEBACK = 16_000
"""Characters of one traceback."""
MAX_LATER = 15


def chain(error: BaseException) -> list[BaseException]:
    """All exceptions that ``error`` holds on to and ``error`` itself, the earliest first.

    A context that was suppressed (``raise ... from None``) counts as well, for it happened; but not
    one without a message, such as the StopIteration of an iterator that was asked for its first.
    """
    ordered: list[BaseException] = []
    seen: set[int] = set()
    pending = [(error, False)]
    while pending:  # not recursive: a loop that fails again and again makes long chains
        current, walked = pending.pop()
        if walked:
            ordered.append(current)
        elif id(current) not in seen:
            seen.add(id(current))
            pending.append((current, True))
            pending += [(earlier, False) for earlier in reversed(_before(current))]
    return ordered


def causes(error: BaseException) -> tuple[Cause, tuple[Cause, ...]]:
    """The first cause, and those that came later in their order (the last ``MAX_LATER``).

    Each one's traceback is its own, without those of the others.
    """
    first, *later = chain(error)
    return _cause(first), tuple(_cause(each) for each in later[-MAX_LATER:])


def message(error: BaseException) -> str:
    """An exception's text, even where its ``__str__`` is broken."""
    try:
        return str(error)
    except Exception as broken:
        return f"<no text: its __str__ raised {type(broken).__name__}>"


def _before(error: BaseException) -> list[BaseException]:
    members = list(error.exceptions) if isinstance(error, BaseExceptionGroup) else []
    context = error.__context__
    if context is not None and error.__suppress_context__ and not message(context):
        context = None
    direct = [each for each in (error.__cause__, context) if each is not None]
    return direct + members


def _cause(error: BaseException) -> Cause:
    """Its text is its type where it has no message: what is shown alone must not be empty."""
    formatted = "".join(traceback.format_exception(error, chain=False))
    name = _type_name(error)
    return Cause(name, _shorten(message(error) or name, MAX_TEXT), _shorten_middle(formatted))


def _type_name(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else _qualified(kind)


def _qualified(kind: type[BaseException]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _shorten_middle(text: str) -> str:
    """A traceback's end holds the innermost frames and the message, and its head where it began."""
    if len(text) <= MAX_TRACEBACK:
        return text
    mark = "\n  … shortened …\n"
    head = MAX_TRACEBACK // 4
    tail = MAX_TRACEBACK - head - len(mark)
    return text[:head] + mark + text[-tail:]
