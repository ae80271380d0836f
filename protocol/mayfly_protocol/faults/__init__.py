"""Faults that MLX can raise, end a process with or hang on, and the cost of each.

MLX raises nothing but ``RuntimeError`` and ``ValueError``, and often the process is gone before
anybody can catch them. So a fault is recognised by its text, by the exit status of the process, or
by a timeout. The fault table in this package is the single place that says how a kind of fault is
recognised, how much is lost with it, and what is done::

    kinds                       the fields of one kind of fault
    metal, cuda, engine, exits  the kinds themselves
    classify                    the table; the kind of an error text, an exception or an exit
    explain                     search for faults in a log
    examples                    example texts of each kind
"""

from mayfly_protocol.faults.classify import (
    KINDS,
    TABLE,
    Classification,
    causes,
    chain,
    classify_exception,
    classify_exit,
    classify_text,
)
from mayfly_protocol.faults.explain import Explanation, LaterFault, LogFault, explain
from mayfly_protocol.faults.kinds import Blame, Kind

__all__ = [
    "KINDS",
    "TABLE",
    "Blame",
    "Classification",
    "Explanation",
    "Kind",
    "LaterFault",
    "LogFault",
    "causes",
    "chain",
    "classify_exception",
    "classify_exit",
    "classify_text",
    "explain",
]
