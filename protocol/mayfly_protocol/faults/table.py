"""The fault table: every kind of fault in the order in which texts are tried against them."""

from __future__ import annotations

from mayfly_protocol.faults.cuda import CUDA
from mayfly_protocol.faults.ends import ENDS, LEAVINGS
from mayfly_protocol.faults.engine import ENGINE, STREAM_THREAD
from mayfly_protocol.faults.kind import Kind
from mayfly_protocol.faults.metal import METAL

TABLE: tuple[Kind, ...] = (*METAL, STREAM_THREAD, *CUDA, *ENGINE, *ENDS)

KINDS: dict[str, Kind] = {kind.name: kind for kind in (*TABLE, *LEAVINGS)}
"""By name: all that a verdict, an autopsy or a roster can say."""

MESSAGES: tuple[Kind, ...] = (*METAL, STREAM_THREAD, *CUDA, *ENGINE)
"""Those that the text of an error tells."""
