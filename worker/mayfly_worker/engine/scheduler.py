"""The engine thread: the only one that touches MLX.

One turn of the loop::

    commands -> decode step -> (events out) -> finished rows leave -> requests start
             -> one prefill chunk of one group -> rows that are ready join the decode batch

Tokens are out before the next prefill chunk runs, and a chunk is sized by time, so that a long
prompt delays others by a bounded amount. Several groups of prompts take turns.

The thread knows nothing of sockets, text or clients. Commands come through a queue, events leave
through one callable, a list a turn.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any

import mlx.core as mx

from mayfly_protocol.breadcrumb import Breadcrumb, BreadcrumbWriter
from mayfly_protocol.common.histogram import STEP_BOUNDS_S
from mayfly_protocol.counters import Memory
from mayfly_protocol.lifecycle import WorkPhase
from mayfly_worker.engine import admission, caches
from mayfly_worker.engine.admission import Budget
from mayfly_worker.engine.chunks import SMALLEST, ChunkSizer
from mayfly_worker.engine.decode import NonFiniteLogits
from mayfly_worker.engine.engine_counters import EngineCounters
from mayfly_worker.engine.prefill import PrefillGroup, Prompt
from mayfly_worker.engine.sequence import (
    Cancel,
    Command,
    Event,
    Prefilled,
    SampledToken,
    SequenceFailed,
    SequenceState,
    Shutdown,
    Start,
    Started,
    StepResult,
    Stop,
)
from mayfly_worker.engine.sub_batches import SubBatches
from mayfly_worker.prefix_cache import PrefixCache

PREFILL_ROWS = 32
"""Rows of one group. Larger groups are fewer: each costs the host the launch of a forward pass."""
PREFILL_GROUPS = 3
PADDING_LIMIT = 2.0
"""A prompt joins a group only if it is at most this many times as long as the group's shortest."""
PROMPT_KEEP = 256
"""A prompt's end is kept if at least so many of its tokens are new: with fewer it is cheaper to
wait for the answer's end, which holds them too. Caches that cannot be trimmed have no use for that
and are kept at every boundary."""
CLEAR_CACHE_STEPS = 512


class Engine:
    """Runs requests on a loaded model.

    ``padding_safe`` says whether prompts of different lengths may be prefilled together (some
    state-space models ignore the padding mask). Rows that cannot decode together at all need a
    budget of one row. ``pass_cost_tokens`` is what a forward pass costs: see :mod:`.lanes`.
    ``when_idle`` is called on the engine thread after every ``idle_s`` seconds in which there was
    nothing to do.
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
        padding_safe: bool = True,
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
        self._prefixes = prefixes
        self._emit = emit
        self._new_cache = new_cache
        self._padding_safe = padding_safe
        self._bucketed = bucketed and padding_safe
        self._trimmable = caches.trimmable(new_cache())
        self.commands: SimpleQueue[Command] = SimpleQueue()
        self.counters = counters or EngineCounters()
        self._when_idle = when_idle
        self._idle_s = idle_s
        self._breadcrumbs = breadcrumbs
        self._waiting: deque[Start] = deque()
        self._groups: deque[PrefillGroup] = deque()
        self._shapes: set[tuple[int, int, int]] = set()  # that were planned
        self._decode = SubBatches(model, width, pass_cost_tokens)
        self._owners: dict[int, Start] = {}  # by row id, of every row that runs
        self._events: list[Event] = []

    def run(self) -> None:
        """Serves until told to leave. Whatever a forward pass raises comes out of here: the state
        that it leaves behind is not to be used again."""
        while self.turn():
            pass

    def turn(self) -> bool:
        """One turn of the loop; False when it was told to leave. Waits where nothing is to do."""
        if not self._obey():
            return False
        if len(self._decode):
            self._decode_step()
            self._flush()
        self._start_waiting()
        if self._groups:
            self._prefill_chunk()
        self._flush()
        self._measure()
        return True

    def suspects_of(self, error: Exception) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The requests that may have caused what :meth:`run` raised, and the others of the forward
        pass that it surfaced in. Bad logits are their own rows' fault, anything else that of
        requests that were new."""
        if isinstance(error, NonFiniteLogits):
            return tuple(dict.fromkeys(self._owners[row].rid for row in error.rows)), ()
        forward = self.counters.forward
        return forward.suspects, forward.marked

    @property
    def running(self) -> int:
        """Rows that have left the queue."""
        return sum(1 for _ in self._running())

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    # Commands

    def _obey(self) -> bool:
        block = not (len(self._decode) or self._groups or self._waiting)
        if block:
            self._settle()
        while True:
            try:
                command = self.commands.get(block, self._idle_s)
            except Empty:
                if block and self._when_idle is not None:
                    self._when_idle()
                return True
            block = False
            match command:
                case Start():
                    self._waiting.append(command)
                case Stop(row):
                    self._stop(row)
                case Cancel(key):
                    self._cancel(key)
                case Shutdown():
                    return False

    def _stop(self, row: int) -> None:
        self._remove_decoding([i for i, r in enumerate(self._decode.rows) if r.id == row])
        # One that had to make room meanwhile waits by itself, or is on its way back.
        self._withdraw(lambda _, first: first.id == row)
        self._owners.pop(row, None)

    def _withdraw(self, gone: Callable[[str, SequenceState], bool]) -> None:
        """Takes out of the queue and of prefill what ``gone`` says of a key and its first row."""
        self._waiting = deque(s for s in self._waiting if not gone(s.key, s.rows[0]))
        for group in self._groups:
            group.remove([i for i, p in enumerate(group.prompts) if gone(p.key, p.row)])
        self._groups = deque(g for g in self._groups if len(g))

    def _cancel(self, key: str) -> None:
        self._withdraw(lambda its, _: its == key)
        rows = [i for i, r in enumerate(self._decode.rows) if self._owners[r.id].key == key]
        self._remove_decoding(rows, keep=False)
        self._owners = {row: o for row, o in self._owners.items() if o.key != key}

    # Decoding

    def _decode_step(self) -> None:
        begin = time.monotonic()
        drawn: list[SampledToken] = []
        failed: dict[int, str] = {}
        for batch in self._decode.batches:
            self._enter("decode", batch.rows)
            drawn += batch.step()
            failed |= batch.failed
            batch.failed = {}
        took = time.monotonic() - begin
        self.counters.decode_s = self.counters.decode_s.observed(took, STEP_BOUNDS_S)
        self.counters.steps += 1
        self.counters.generated_tokens += len(drawn)
        if drawn:
            self._events.append(StepResult(drawn))
        self._events += [SequenceFailed(row, why) for row, why in failed.items()]
        ended = {d.row for d in drawn if d.end is not None} | failed.keys()
        if ended:
            self._remove_decoding([i for i, r in enumerate(self._decode.rows) if r.id in ended])
        self._make_room()
        if self.counters.steps % CLEAR_CACHE_STEPS == 0:
            mx.clear_cache()

    def _make_room(self) -> None:
        """Sends the newest rows back to the queue while the running ones outgrow the budget. They
        start again from the prefix cache, or from their tokens."""
        while len(self._decode) > 1 and not self._budget.holds(self._batches()):
            newest, row = max(enumerate(self._decode.rows), key=lambda each: each[1].id)
            owner = self._owners[row.id]
            self._remove_decoding([newest])
            self._waiting.appendleft(Start(owner.key, [row], (), owner.rid))

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
        """Moves requests from the queue into a new prefill group, first come first served."""
        if not self._waiting or len(self._groups) >= PREFILL_GROUPS:
            return
        candidates = self._candidates()
        if self._bucketed and candidates:
            # Group sizes are shapes, too: powers of two are few.
            candidates = candidates[: 1 << (len(candidates).bit_length() - 1)]
        if not candidates:
            return
        for start, prompt, _ in candidates:
            self._waiting.popleft()
            self._admitted(start, prompt)
        self._groups.append(
            PrefillGroup(
                self._model,
                [prompt for _, prompt, _ in candidates],
                [cache for _, _, cache in candidates],
                bucketed=self._bucketed,
            )
        )

    def _candidates(self) -> list[tuple[Start, Prompt, caches.Cache]]:
        """The requests at the head of the queue that can be prefilled as one group now."""
        found: list[tuple[Start, Prompt, caches.Cache]] = []
        running = list(self._running())
        room = self._chunks.tokens(decoding=bool(len(self._decode)))
        for start in islice(self._waiting, PREFILL_ROWS if self._padding_safe else 1):
            if not self._budget.admits(running, start.rows):
                break
            tokens = start.rows[0].tokens
            hit = self._prefixes.lookup(tokens, at_most=len(tokens) - 1)
            prompt = _prompt(start, hit.length if hit else 0)
            if found and not _together([*(p for _, p, _ in found), prompt], room):
                break
            found.append((start, prompt, hit.caches if hit else self._new_cache()))
            running += start.rows
        return found

    def _admitted(self, start: Start, prompt: Prompt) -> None:
        self._owners.update((row.id, start) for row in start.rows)
        self.counters.cached_tokens += prompt.cached
        self.counters.prompt_tokens += len(start.rows[0].tokens)
        self._events.append(Started(start.key, prompt.cached, prompt.target))

    def _prefill_chunk(self) -> None:
        group = self._groups.popleft()
        # What is in the cache to its end is fed nothing, and some kinds of cache do not take that.
        self._promote(group)
        if group.left:
            self._enter("prefill", [p.row for p in group.prompts])
            size = self._chunks.size(decoding=bool(len(self._decode)), rows=len(group))
            begin = time.monotonic()
            fed = group.feed(size)
            took = time.monotonic() - begin
            planned = self._bucketed and group.shape not in self._shapes
            if planned:
                self._shapes.add(group.shape)
            self._chunks.measured(fed, took, planned=planned)
            self.counters.prefill_s = self.counters.prefill_s.observed(took, STEP_BOUNDS_S)
            self.counters.chunk_lengths.add(group.shape[1])
            self.counters.prefill_lengths = len(self.counters.chunk_lengths)
            self._events += [Prefilled(p.key, p.fed, p.target) for p in group.prompts]
        self._keep_boundaries(group)
        self._promote(group)
        if len(group):
            self._groups.append(group)

    def _keep_boundaries(self, group: PrefillGroup) -> None:
        for i, prompt in enumerate(group.prompts):
            at_end = prompt.left == 0
            worth = prompt.fed - prompt.cached >= PROMPT_KEEP or not self._trimmable
            if prompt.fed and ((at_end and worth) or prompt.fed in prompt.stops):
                fed = prompt.row.tokens[: prompt.fed]
                self._prefixes.insert(fed, group.take(i), kind="prompt" if at_end else "system")

    def _promote(self, group: PrefillGroup) -> None:
        ready = [i for i, p in enumerate(group.prompts) if p.left == 0]
        if not ready:
            return
        copies = [
            # Of some kinds of cache what is empty cannot be taken out.
            (group.take(i) if prompt.fed else self._new_cache(), prompt.copies)
            for i, prompt in enumerate(group.prompts)
            if prompt.left == 0 and prompt.copies
        ]
        rows = [group.prompts[i].row for i in ready]
        self._decode.join(rows, group.split(ready))
        for cache, more in copies:
            self._decode.join(more, caches.merge([cache] * len(more)))

    # Accounts

    def _enter(self, phase: WorkPhase, rows: Sequence[SequenceState]) -> None:
        """Says what the next forward pass is, before it runs."""
        self.counters.phase = phase
        named = [(self._owners[row.id].rid, row.young) for row in rows]
        requests = dict.fromkeys(rid for rid, _ in named)
        young = dict.fromkeys(rid for rid, is_young in named if is_young)
        forward = Breadcrumb(phase, self.counters.progress, tuple(requests), tuple(young))
        self.counters.forward = forward
        if self._breadcrumbs is not None:
            self._breadcrumbs.write(phase, forward.step, forward.requests, forward.young)

    def _flush(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._emit(events)

    def _measure(self) -> None:
        self.counters.progress += 1
        self.counters.rows = len(self._decode)
        prefilling = [[prompt.row for prompt in group.prompts] for group in self._groups]
        self.counters.kv_bytes = self._budget.taken([*self._batches(), *prefilling])
        if self.counters.progress % 32 == 0:
            self._weigh()

    def _settle(self) -> None:
        """Before the thread goes to sleep: nothing runs, and the buffers go back."""
        self._enter("idle", [])
        self.counters.rows = self.counters.kv_bytes = 0
        mx.clear_cache()
        self._weigh()

    def _weigh(self) -> None:
        self.counters.memory = Memory(
            active=mx.get_active_memory(),
            cache=mx.get_cache_memory(),
            peak=mx.get_peak_memory(),
            prefix_cache=self._prefixes.nbytes,
            device_free=admission.free_memory(),
        )


def _prompt(start: Start, cached: int) -> Prompt:
    leader, *copies = start.rows
    stops = sorted(b for b in set(start.boundaries) if cached < b < len(leader.tokens) - 1)
    return Prompt(start.key, leader, cached, copies, stops, cached)


def _together(prompts: list[Prompt], room: int) -> bool:
    """Whether prompts can be prefilled as one group: in one chunk, and without much padding."""
    lengths = [max(p.left, SMALLEST) for p in prompts]
    longest = max(lengths)
    return longest <= PADDING_LIMIT * min(lengths) and longest * len(lengths) <= room
