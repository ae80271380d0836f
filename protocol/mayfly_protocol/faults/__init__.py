"""Faults that MLX can raise, end a process with or hang on, and the cost of each.

MLX raises nothing but ``RuntimeError`` and ``ValueError``, and often the process is gone before
anybody can catch them. So a fault is known by its text, by the exit status, or by clocks. The
table is the single place that says how it is known, how much is lost with it, and what is done::

    kinds                       the fields of a kind
    metal, cuda, engine, exits  the kinds themselves
    classify                    the table; an error, an exception or an exit to its kind
    explain                     the faults in a log
    examples                    texts of each kind
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
