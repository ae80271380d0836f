"""What is known of one kind of fault."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from mayfly_protocol.lifecycle import Scope

Blame = Literal["suspects", "none"]


@dataclass(frozen=True, slots=True)
class Kind:
    """A row of the fault table.

    ``scope`` says how much is lost with it::

        request   that request fails, and nothing else
        batch     the batch is thrown away and rebuilt in the same process, its requests retried
        recycle   the worker hands its requests over and leaves in good order
        worker    the process is poisoned: it leaves at once
        machine   the same, and the next one is not started right away
        model     it would happen to the next worker too: the slot fails until it is reconfigured

    ``blame`` says whether the requests of the forward pass that failed become suspects, or the
    fault is surely not theirs. One that ``follows`` is never the first of its process: whatever
    else is found near it came before it and is the cause.

    ``signature`` matches within one line of a message or a log. Where it is None, the kind is
    known by how a process ended or by what was measured, never by a text.
    """

    name: str
    scope: Scope
    meaning: str
    """What happened, for somebody who has the error's text before them."""
    reaction: str
    """What Mayfly does about it by itself."""
    advice: str
    """What the reader can do about it."""
    signature: re.Pattern[str] | None = None
    blame: Blame = "suspects"
    follows: bool = False
