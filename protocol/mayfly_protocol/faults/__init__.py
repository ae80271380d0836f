"""What MLX can throw, die from or hang on, and what each such fault costs.

MLX raises nothing but ``RuntimeError`` and ``ValueError``, and often the process is gone before
anybody can catch them. So a fault is known by its text, by the exit status, or by clocks. The
table is the single place that says how, how much is lost with it, and what is done::

    table       all kinds in order          kind      what one is made of
    metal, cuda, engine, ends               the kinds themselves
    classify    from an error to a kind     causes    exceptions, the first one first
    explain     the faults in a log         search    signatures in texts
    examples    how they are worded
"""

from mayfly_protocol.faults.classify import (
    KINDS,
    TABLE,
    Verdict,
    causes,
    chain,
    classify_exception,
    classify_exit,
    classify_text,
)
from mayfly_protocol.faults.explain import Explanation, Later, Sighting, explain
from mayfly_protocol.faults.kinds import Blame, Kind

__all__ = [
    "KINDS",
    "TABLE",
    "Blame",
    "Explanation",
    "Kind",
    "Later",
    "Sighting",
    "Verdict",
    "causes",
    "chain",
    "classify_exception",
    "classify_exit",
    "classify_text",
    "explain",
]
