"""The engine: continuous batching of sequences on one loaded model.

One turn of the engine's loop::

    commands -> decode step -> events out -> waiting requests start
             -> one prefill chunk of one group -> finished prompts join the decode batch

The request of a suspect sequence, on which earlier workers may have failed, is alone in its forward
passes, and no other pass is unfinished beside them: an error of such a pass is that request's. Once
the sequence has generated a few tokens here, it joins the others.

Tokens are sent before the next prefill chunk runs, and a chunk is sized by time, so that a long
prompt delays other requests by a bounded amount. Several groups of prompts take turns.

The engine runs on the one thread that uses MLX. It knows nothing of sockets, text or clients:
commands arrive through a queue, lists of events leave through one callable.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

import mlx.core as mx

from mayfly_protocol.breadcrumb import Breadcrumb, BreadcrumbWriter
from mayfly_protocol.common.histogram import STEP_BOUNDS_S
from mayfly_protocol.counters import Memory
from mayfly_protocol.lifecycle import WorkPhase
from mayfly_worker.engine import admission, caches
from mayfly_worker.engine.admission import Budget
from mayfly_worker.engine.chunks import ChunkSizer
from mayfly_worker.engine.decode import NonFiniteLogits
from mayfly_worker.engine.engine_counters import EngineCounters
from mayfly_worker.engine.logprobs import scored_chunk
from mayfly_worker.engine.prefill import PrefillGroup, Prompt, fit_together
from mayfly_worker.engine.sequence import (
    CancelCommand,
    Command,
    Event,
    Prefilled,
    PromptScored,
    SampledToken,
    SequenceFailed,
    SequenceState,
    Start,
    Started,
    StepResult,
    Stop,
)
from mayfly_worker.engine.sub_batches import SubBatches
from mayfly_worker.prefix_cache import PrefixCache

PREFILL_ROWS = 32
"""Largest number of prompts that are prefilled together, by the same forward passes (a group)."""
PREFILL_GROUPS = 3
"""Largest number of groups of prompts that are prefilled in turn, one chunk of a group after
another."""
PROMPT_KEEP = 256
"""Fewest new prompt tokens for which the KV state at a prompt's end is stored in the prefix cache.
With fewer, only the state at the answer's end is stored, which includes the prompt's. Caches that
cannot be trimmed back to the prompt are stored at the end of every prompt instead."""
CLEAR_CACHE_STEPS = 512
"""Number of decode steps between two returns of MLX's unused buffers to the system."""
MEMORY_TURNS = 32
"""Turns of the engine's loop between two readings of MLX's memory counters."""


class Engine:
    """Runs requests on a loaded model by continuous batching.

    Args:
        width: length of a row of logits.
        padding_safe: prompts of different lengths may be prefilled together (some state-space
            models ignore the padding mask).
        mixed_states: a sequence that has just begun, whose recurrent states are empty or shorter,
            may decode together with others.
        cuttable: prompts may be prefilled in chunks, and from the prefix cache.
        batchable: sequences may decode together. A model for which this is false is run with its
            plain caches, and needs a budget of one sequence.
        bucketed: chunks are padded to a few lengths, since new shapes are expensive on CUDA.
        pass_cost_tokens: cost of a forward pass, as the number of tokens of one row's KV cache that
            can be read in the same time.
        when_idle: called on the engine thread after every ``idle_s`` seconds without work.
    """

    def __init__(
        self,
        model: Any,
        width: int,
        *,
        budget: Budget,
        chunks: ChunkSizer,
        prefixes: PrefixCache,
        emit: Callable[[list[Event]], None],
        new_cache: caches.Factory,
        batchable: bool = True,
        padding_safe: bool = True,
        mixed_states: bool = True,
        cuttable: bool = True,
        bucketed: bool = False,
        pass_cost_tokens: float = float("inf"),
        counters: EngineCounters | None = None,
        when_idle: Callable[[], None] | None = None,
        idle_s: float | None = None,
        breadcrumbs: BreadcrumbWriter | None = None,
    ) -> None:
        self._model = model
        self._width = width
        self._budget = budget
        self._chunks = chunks
        self._prefixes = prefixes if cuttable else PrefixCache(0)
        self._cuttable = cuttable
        self._emit = emit
        self._new_cache = new_cache
        self._batchable = batchable
        self._padding_safe = padding_safe and batchable and cuttable
        self._bucketed = bucketed and self._padding_safe
        self._trimmable = caches.trimmable(new_cache())
        self.commands: SimpleQueue[Command] = SimpleQueue()
        self.counters = counters or EngineCounters()
        self._when_idle = when_idle
        self._idle_s = idle_s
        self._breadcrumbs = breadcrumbs
        self._waiting: deque[Start] = deque()
        self._groups: deque[PrefillGroup] = deque()
        self._planned_shapes: set[tuple[int, int, int]] = set()
        self._decode = SubBatches(model, width, pass_cost_tokens, mixed_states=mixed_states)
        self._owners: dict[int, Start] = {}  # request by id of a running sequence
        self._events: list[Event] = []
        self._peak = self.counters.memory.peak  # before the last reset of MLX's own

    def run(self) -> NoReturn:
        """Serves requests until the process ends.

        Raises:
            Exception: any error of a forward pass. The engine must not be used after such an error.
        """
        while True:
            self.turn()

    def turn(self) -> None:
        """Runs one turn of the engine's loop. Waits while there is no work."""
        self._process_commands()
        self._decode_step()
        self._emit_events()
        self._start_waiting()
        self._prefill_chunk()
        self._emit_events()
        self._update_counters()

    def suspects_of(self, error: BaseException) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the ids of the requests that may have caused an error of :meth:`run`, and the ids
        of the other requests in the forward pass that raised it.

        Invalid logits are blamed on their own sequences, any other error on requests that were new.
        """
        if isinstance(error, NonFiniteLogits):
            return tuple(dict.fromkeys(self._owners[row].rid for row in error.rows)), ()
        forward = self.counters.forward
        return forward.suspects, forward.marked

    @property
    def running(self) -> int:
        """Number of sequences in prefill or decoding."""
        return sum(1 for _ in self._running())

    @property
    def waiting(self) -> int:
        """Number of requests in the engine's queue."""
        return len(self._waiting)

    # Commands

    def _process_commands(self) -> None:
        """Carries out all commands in the queue. Waits for a command while there is no work."""
        block = not (len(self._decode) or self._groups or self._waiting)
        if block:
            self._become_idle()
        while True:
            try:
                command = self.commands.get(block, self._idle_s)
            except Empty:
                if block and self._when_idle is not None:
                    self._when_idle()
                return
            block = False
            match command:
                case Start():
                    self._waiting.append(command)
                case Stop(row):
                    self._stop(row)
                case CancelCommand(key):
                    self._cancel(key)

    def _stop(self, row: int) -> None:
        self._remove_decoding([i for i, r in enumerate(self._decode.rows) if r.id == row])
        # A sequence that was sent back to the queue is waiting or in prefill again.
        self._withdraw(lambda _, first: first.id == row)
        self._owners.pop(row, None)

    def _withdraw(self, gone: Callable[[str, SequenceState], bool]) -> None:
        """Removes the requests for which ``gone(key, first sequence)`` is true from the engine's
        queue and from prefill."""
        self._waiting = deque(s for s in self._waiting if not gone(s.key, s.rows[0]))
        for group in self._groups:
            group.remove([i for i, p in enumerate(group.prompts) if gone(p.key, p.row)])
        self._groups = deque(g for g in self._groups if len(g))

    def _cancel(self, key: str) -> None:
        self._withdraw(lambda other, _: other == key)
        rows = [i for i, r in enumerate(self._decode.rows) if self._owners[r.id].key == key]
        self._remove_decoding(rows, keep=False)
        self._owners = {row: o for row, o in self._owners.items() if o.key != key}

    # Decoding

    def _decode_step(self) -> None:
        """Samples the next token of every decoding sequence, and removes ended sequences."""
        if not len(self._decode):
            return
        begin = time.monotonic()
        sampled: list[SampledToken] = []
        failed: dict[int, str] = {}
        settling = any(row.suspect for row in self._running())
        for batch in self._decode.batches:
            self._begin_pass("decode", batch.rows)
            sampled += batch.step()
            if settling:
                batch.settle()
            failed |= batch.failed
            batch.failed = {}
        took = time.monotonic() - begin
        self.counters.decode_s = self.counters.decode_s.observed(took, STEP_BOUNDS_S)
        self.counters.steps += 1
        self.counters.generated_tokens += len(sampled)
        if sampled:
            self._events.append(StepResult(sampled))
        self._events += [SequenceFailed(row, why) for row, why in failed.items()]
        ended = {d.row for d in sampled if d.end is not None} | failed.keys()
        if ended:
            self._remove_decoding([i for i, r in enumerate(self._decode.rows) if r.id in ended])
        self._make_room()
        self._release_proven()
        if self.counters.steps % CLEAR_CACHE_STEPS == 0:
            mx.clear_cache()

    def _release_proven(self) -> None:
        """Ends the isolation of suspects that have generated enough tokens here. Where others
        decode, such a sequence goes back to the head of the queue, to join them."""
        for row in [row for row in self._decode.rows if row.suspect and not row.young]:
            row.suspect = False
            if len(self._decode.batches) > 1:
                self._send_back(self._decode.rows.index(row))

    def _send_back(self, index: int) -> None:
        """Moves a decoding sequence to the head of the queue. It starts again from the prefix
        cache, or from its tokens."""
        row = self._decode.rows[index]
        owner = self._owners[row.id]
        self._remove_decoding([index])
        self._waiting.appendleft(Start(owner.key, [row], (), owner.rid))

    def _make_room(self) -> None:
        """While the decoding sequences exceed the memory budget, sends the newest of them back to
        the queue."""
        while len(self._decode) > 1 and not self._budget.holds(self._batches()):
            newest, _ = max(enumerate(self._decode.rows), key=lambda each: each[1].id)
            self._send_back(newest)

    def _batches(self) -> list[list[SequenceState]]:
        return [batch.rows for batch in self._decode.batches]

    def _remove_decoding(self, indices: list[int], keep: bool = True) -> None:
        if not indices:
            return
        if keep:
            for i in indices:
                tokens, cache = self._decode.take(i)
                self._prefixes.insert(tokens, cache, kind="answer")
        for i in indices:
            self._owners.pop(self._decode.rows[i].id, None)
        self._decode.remove(indices)

    # Prefill

    def _running(self) -> Iterator[SequenceState]:
        yield from self._decode.rows
        for group in self._groups:
            for prompt in group.prompts:
                yield prompt.row
                yield from prompt.copies

    def _start_waiting(self) -> None:
        """Moves waiting requests into a new prefill group, first come first served."""
        if not self._waiting or len(self._groups) >= PREFILL_GROUPS:
            return
        candidates = self._candidates()
        if self._bucketed and candidates:
            # A group's size is part of its shape: powers of two keep shapes few.
            candidates = candidates[: 1 << (len(candidates).bit_length() - 1)]
        if not candidates:
            return
        if candidates[0][1].row.suspect:
            self._settle()
        for start, prompt, _ in candidates:
            self._waiting.popleft()
            self._record_start(start, prompt)
        self._groups.append(
            PrefillGroup(
                self._model,
                [prompt for _, prompt, _ in candidates],
                [cache for _, _, cache in candidates],
                bucketed=self._bucketed,
                batchable=self._batchable,
            )
        )

    def _candidates(self) -> list[tuple[Start, Prompt, caches.Cache]]:
        """Returns the requests at the head of the queue that can be prefilled as one group now."""
        found: list[tuple[Start, Prompt, caches.Cache]] = []
        running = list(self._running())
        room = self._chunks.tokens(decoding=bool(len(self._decode)))
        for start in islice(self._waiting, PREFILL_ROWS if self._padding_safe else 1):
            if not self._budget.admits(running, start.rows):
                break
            tokens = start.rows[0].tokens
            # What is in the cache is not computed again, and gives no logits.
            fresh = start.prompt_logprobs is not None
            hit = None if fresh else self._prefixes.lookup(tokens, at_most=len(tokens) - 1)
            prompt = Prompt.of(start, hit.length if hit else 0)
            alone = prompt.row.suspect
            if found and (alone or not fit_together([*(p for _, p, _ in found), prompt], room)):
                break
            found.append((start, prompt, hit.caches if hit else self._new_cache()))
            if alone:
                break
            running += start.rows
        return found

    def _settle(self) -> None:
        """Waits for every decode step that was launched, in the name of its own requests."""
        for batch in self._decode.batches:
            self._begin_pass("decode", batch.rows)
            batch.settle()

    def _record_start(self, start: Start, prompt: Prompt) -> None:
        self._owners.update((row.id, start) for row in start.rows)
        self.counters.cached_tokens += prompt.cached
        self.counters.prompt_tokens += len(start.rows[0].tokens)
        self._events.append(Started(start.key, prompt.cached, prompt.target))
        if start.prompt_logprobs is not None and not prompt.left:
            # A single token has no score.
            self._events.append(PromptScored(start.key, prompt.row.id, []))

    def _prefill_chunk(self) -> None:
        """Runs one prefill chunk of the next group; completed prompts join the decode batch."""
        if not self._groups:
            return
        group = self._groups.popleft()
        # Prompts that the prefix cache holds whole join first: some caches accept no empty input.
        self._promote(group)
        if group.left:
            self._begin_pass("prefill", [p.row for p in group.prompts])
            room = group.room(self._budget.pass_bytes)
            if group.scoring:
                room = min(room, scored_chunk(self._width))
            size = self._chunks.size(
                decoding=bool(len(self._decode)), rows=len(group), at_most=room
            )
            self._peak = max(self._peak, mx.get_peak_memory())
            begin = time.monotonic()
            fed = group.feed(size if self._cuttable else group.prompts[0].uncut)
            took = time.monotonic() - begin
            planned = self._bucketed and group.shape not in self._planned_shapes
            if planned:
                self._planned_shapes.add(group.shape)
            if not group.scoring:
                self._chunks.measured(fed, took, planned=planned)
            self.counters.prefill_s = self.counters.prefill_s.observed(took, STEP_BOUNDS_S)
            self.counters.chunk_lengths.add(group.shape[1])
            self.counters.prefill_lengths = len(self.counters.chunk_lengths)
            self._events += [Prefilled(p.key, p.fed, p.target) for p in group.prompts]
            self._events += group.scored
        self._keep_boundaries(group)
        self._promote(group)
        if len(group):
            self._groups.append(group)

    def _keep_boundaries(self, group: PrefillGroup) -> None:
        """Stores the KV state of each prompt that the last chunk has fed up to the end of its
        system prompt, or of the whole prompt, in the prefix cache."""
        for i, prompt in enumerate(group.prompts):
            at_end = prompt.left == 0
            worth = prompt.fed - prompt.cached >= PROMPT_KEEP or not self._trimmable
            if prompt.fed and ((at_end and worth) or prompt.fed in prompt.stops):
                fed = prompt.row.tokens[: prompt.fed]
                self._prefixes.insert(fed, group.take(i), kind="prompt" if at_end else "system")

    def _promote(self, group: PrefillGroup) -> None:
        """Moves the group's complete prompts, with the other choices of each, to the decode batch;
        of those that were only to be scored, nothing is left to do."""
        over = [i for i, p in enumerate(group.prompts) if p.left == 0 and not p.row.max_tokens]
        for i in over:
            for row in (group.prompts[i].row, *group.prompts[i].copies):
                self._owners.pop(row.id, None)
        group.remove(over)
        ready = [i for i, p in enumerate(group.prompts) if p.left == 0]
        if not ready:
            return
        copies = [
            # Some classes of cache cannot copy an empty row.
            (group.take(i) if prompt.fed else self._new_cache(), prompt.copies)
            for i, prompt in enumerate(group.prompts)
            if prompt.left == 0 and prompt.copies
        ]
        rows = [group.prompts[i].row for i in ready]
        self._decode.join(rows, group.split(ready))
        for cache, more in copies:
            self._decode.join(more, caches.merge([cache] * len(more)))

    # Reporting

    def _begin_pass(self, phase: WorkPhase, rows: Sequence[SequenceState]) -> None:
        """Records the next forward pass's phase and requests, also in a file for crash reports."""
        self.counters.phase = phase
        named = [(self._owners[row.id].rid, row.young) for row in rows]
        requests = dict.fromkeys(rid for rid, _ in named)
        young = dict.fromkeys(rid for rid, is_young in named if is_young)
        forward = Breadcrumb(phase, self.counters.progress, tuple(requests), tuple(young))
        self.counters.forward = forward
        if self._breadcrumbs is not None:
            self._breadcrumbs.write(phase, forward.step, forward.requests, forward.young)

    def _emit_events(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._emit(events)

    def _update_counters(self) -> None:
        self.counters.progress += 1
        self.counters.rows = len(self._decode)
        prefilling = [[prompt.row for prompt in group.prompts] for group in self._groups]
        self.counters.kv_bytes = self._budget.taken([*self._batches(), *prefilling])
        if self.counters.progress % MEMORY_TURNS == 0:
            self._update_memory()

    def _become_idle(self) -> None:
        """Sets the counters to idle and returns MLX's unused buffers, before the thread waits."""
        self._begin_pass("idle", [])
        self.counters.rows = self.counters.kv_bytes = 0
        mx.clear_cache()
        self._update_memory()

    def _update_memory(self) -> None:
        self.counters.memory = Memory(
            active=mx.get_active_memory(),
            cache=mx.get_cache_memory(),
            peak=max(self._peak, mx.get_peak_memory()),
            prefix_cache=self._prefixes.nbytes,
            device_free=admission.free_memory(),
        )
