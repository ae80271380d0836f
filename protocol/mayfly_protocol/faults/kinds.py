"""Description of one kind of fault."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from mayfly_protocol.lifecycle import Scope

Blame = Literal["suspects", "none"]


@dataclass(frozen=True, slots=True)
class Kind:
    """A row of the fault table: one kind of fault.

    ``scope`` says how much is lost::

        request   the request fails, and nothing else
        batch     the batch is thrown away and rebuilt in the same process, its requests retried
        recycle   the worker gives its requests to other workers and leaves in good order
        worker    the process cannot be trusted any more: it leaves at once
        machine   as ``worker``, and the next worker is not started right away
        model     the next worker would fail, too: none is started until the model is reconfigured

    ``blame`` is ``suspects`` if a request of the forward pass that failed may have caused the
    fault, and ``none`` if no request can have caused it. A kind that ``follows`` is never the first
    fault of its process: any other fault near it came before it and is the cause.

    ``signature`` matches within one line of a message or a log. If ``signature`` is None, the kind
    is recognised by the end of a process or by a measurement, never by a text.
    """

    name: str
    scope: Scope
    meaning: str
    """Explanation of the fault, for a reader who sees the error's text."""
    reaction: str
    """Mayfly's own reaction to the fault."""
    advice: str
    """Measures that the reader of the error can take against the fault."""
    signature: re.Pattern[str] | None = None
    blame: Blame = "suspects"
    follows: bool = False
