"""Mitigations: milder settings for the next workers of a slot, by the faults of the last workers.

====================  =========================  =================================================
after                 times                      the successor
====================  =========================  =================================================
a CUDA graph's fault  twice in a row             runs without graphs
metal_timeout         twice in a row             runs shorter command buffers
metal_interactivity   each                       cuts prompts into chunks of half the time
metal_out_of_memory   each                       decodes half as many rows together
killed_by_system      each, once it has loaded   may use a fifth less memory than the lost worker
====================  =========================  =================================================

Mitigations stay for as long as the reaper runs: a worker that runs well because of a mitigation is
no reason to drop it. Variables that the user has set in the workers' environment are not changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from mayfly_protocol.settings import WorkerSettings

GRAPH_FAULTS = frozenset(
    {"cuda_graph_launch", "cuda_graph_poison", "cuda_graph_thrash", "cuda_capture"}
)
MOST_HALVINGS = 3
LESS_MEMORY = 0.8
LEAST_OVER_WEIGHTS = 1.1
"""Least memory limit of a worker, as a multiple of its weights: a worker needs memory to compute,
too."""

DEFAULTS = {field.name: field.default for field in fields(WorkerSettings)}


@dataclass(frozen=True, slots=True)
class Mitigations:
    """Milder settings for the next workers of a slot. ``halved_chunks`` and ``halved_rows`` say how
    often the duration of prefill chunks and the number of rows in a batch were halved;
    ``memory_limit`` is in bytes, 0 for none."""

    without_graphs: bool = False
    short_buffers: bool = False
    halved_chunks: int = 0
    halved_rows: int = 0
    memory_limit: int = 0

    def after(
        self, kind: str, before: str, *, footprint: int = 0, weight_bytes: int = 0
    ) -> Mitigations:
        """Returns the mitigations after one more loss of a worker.

        Args:
            kind: the kind of fault that caused the loss.
            before: the kind of fault of the loss before it.
            footprint: the memory of the lost worker, in bytes; 0 if the model was not loaded yet.
            weight_bytes: the size of the lost worker's weights.
        """
        if kind in GRAPH_FAULTS and before in GRAPH_FAULTS:
            return replace(self, without_graphs=True)
        match kind:
            case "metal_timeout" if before == kind:
                return replace(self, short_buffers=True)
            case "metal_interactivity":
                return replace(self, halved_chunks=min(MOST_HALVINGS, self.halved_chunks + 1))
            case "metal_out_of_memory":
                return replace(self, halved_rows=min(MOST_HALVINGS, self.halved_rows + 1))
            case "killed_by_system" if footprint:
                had = min(footprint, self.memory_limit or footprint)
                least = LEAST_OVER_WEIGHTS * weight_bytes
                return replace(self, memory_limit=int(max(LESS_MEMORY * had, least)))
            case _:
                return self

    def environment(self) -> dict[str, str]:
        """Returns the MLX environment variables by which these mitigations take effect in a
        worker."""
        variables = {}
        if self.without_graphs:
            variables["MLX_USE_CUDA_GRAPHS"] = "0"
        if self.short_buffers:
            # A quarter of what MLX takes on most chips: 40 operations, 40 MB.
            variables |= {"MLX_MAX_OPS_PER_BUFFER": "10", "MLX_MAX_MB_PER_BUFFER": "10"}
        return variables

    def options(self, configured: Mapping[str, object]) -> dict[str, object]:
        """Returns the options for the slot's next worker: ``configured`` (fields of
        :class:`WorkerSettings`) with shorter prefill chunks, fewer rows or a lower memory limit, as
        far as earlier faults ask for it."""
        options = dict(configured)

        def halve(name: str, times: int) -> None:
            value = options.get(name, DEFAULTS[name])
            if times and isinstance(value, int | float):
                options[name] = type(value)(max(value / 2**times, 1 if name == "max_rows" else 0))

        halve("prefill_alone_s", self.halved_chunks)
        halve("prefill_shared_s", self.halved_chunks)
        halve("max_rows", self.halved_rows)
        if self.memory_limit:
            limit = options.get("memory_limit")
            own = limit if isinstance(limit, int) and limit else self.memory_limit
            options["memory_limit"] = min(own, self.memory_limit)
        return options

    def __str__(self) -> str:
        """Returns the mitigations in words; empty if there are none."""
        parts = [f"{name}={value}" for name, value in self.environment().items()]
        if self.halved_chunks:
            parts.append(f"prefill chunks of 1/{2**self.halved_chunks} of the time")
        if self.halved_rows:
            parts.append(f"1/{2**self.halved_rows} of the rows")
        if self.memory_limit:
            parts.append(f"at most {self.memory_limit / 1e9:.1f} GB")
        return ", ".join(parts)


NO_MITIGATIONS = Mitigations()
