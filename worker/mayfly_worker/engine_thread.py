"""The engine thread: loads the model, runs the engine, and builds a new engine after a fault.

::

    load --> canary (test prompts) --> build an engine --> run it
                                             ^               |
                                             |               +-- fault of request or batch scope:
                                             +---------------+   hand all requests over
                                                             +-- any other fault: the thread ends

Only this thread uses MLX. An engine that raised is not used again. After a fault of request or
batch scope the loaded model is still good, and a new engine is built on it; after any other fault
the thread ends without another call into MLX, and the process ends with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mayfly_protocol.breadcrumb import BreadcrumbWriter
from mayfly_protocol.faults import Classification, classify_exception
from mayfly_protocol.lifecycle import LoadPhase, Scope
from mayfly_protocol.settings import WorkerSettings
from mayfly_worker.engine.admission import Budget
from mayfly_worker.engine.chunks import ChunkSizer
from mayfly_worker.engine.engine_counters import EngineCounters
from mayfly_worker.engine.scheduler import Engine
from mayfly_worker.engine.sequence import Event
from mayfly_worker.engine.sub_batches import pass_cost_tokens
from mayfly_worker.model.canary import Canary
from mayfly_worker.model.loading import LoadedModel, load
from mayfly_worker.model.memory import plan, within
from mayfly_worker.model.page_cache import WeightReader
from mayfly_worker.model.weight_files import ModelLoadError
from mayfly_worker.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Report: ``done`` of ``total`` bytes of a phase of loading the model (0 of 0 if the phase has
    no measure)."""

    phase: LoadPhase
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class ModelLoaded:
    """Report: the model is loaded; ``engine`` takes commands from now on, within the memory
    ``budget``."""

    loaded: LoadedModel
    budget: Budget
    engine: Engine


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """Report: loading the model failed with ``error``, and no engine will run. ``kind`` and
    ``scope`` classify the fault; with scope ``model``, loading again would fail again."""

    error: BaseException
    kind: str
    scope: Scope


@dataclass(frozen=True, slots=True)
class EngineFault:
    """Report: the engine raised ``error``, which ``verdict`` classifies. ``rebuilt`` is the new
    engine, or None if the process has to exit. ``suspects`` are the ids of requests that may have
    caused the fault, ``marked`` the ids of the other requests in the forward pass that raised
    it."""

    error: BaseException
    verdict: Classification
    suspects: tuple[str, ...] = ()
    marked: tuple[str, ...] = ()
    rebuilt: Engine | None = None


EngineReport = LoadProgress | ModelLoaded | LoadFailed | EngineFault | list[Event]


class EngineThread:
    """Thread that loads the model and runs the engine. The thread hands its reports to the main
    thread through ``post``. ``weight_reader`` may have begun to read the weight files."""

    def __init__(
        self,
        settings: WorkerSettings,
        weight_reader: WeightReader,
        post: Callable[[EngineReport], None],
    ) -> None:
        self._settings = settings
        self._weight_reader = weight_reader
        self._post = post
        # All engines of this process share the counters, which must not fall.
        self._counters = EngineCounters()
        self._breadcrumbs = (
            BreadcrumbWriter(Path(settings.breadcrumb)) if settings.breadcrumb else None
        )
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _main(self) -> None:
        try:
            loaded, budget = self._load()
            self._post(LoadProgress("canary", 0, 0))
            canary = Canary.of(loaded, self._settings.canary_dir)
            canary.check()
        except ModelLoadError as error:
            self._post(LoadFailed(error, "model_load", "model"))
            return
        except (Exception, SystemExit) as error:
            verdict = classify_exception(error)
            self._post(LoadFailed(error, verdict.kind, verdict.scope))
            return
        build = partial(self._build_engine, loaded, budget, canary)
        first = build()
        self._post(ModelLoaded(loaded, budget, first))
        engine: Engine | None = first
        while engine is not None:
            engine = self._run(engine, build, canary)

    def _load(self) -> tuple[LoadedModel, Budget]:
        def report(phase: LoadPhase, done: int, total: int) -> None:
            self._post(LoadProgress(phase, done, total))

        loaded = load(self._settings, report, self._weight_reader)
        budget = plan(self._settings, loaded)
        return replace(loaded, card=within(loaded.card, budget)), budget

    def _run(self, engine: Engine, build: Callable[[], Engine], canary: Canary) -> Engine | None:
        """Runs an engine until it raises. Returns the engine that replaces it, or None if the
        thread is to end."""
        try:
            engine.run()
        except (Exception, SystemExit) as error:
            verdict = classify_exception(error)
            suspects, marked = (
                engine.suspects_of(error) if verdict.blame == "suspects" else ((), ())
            )
            rebuilt = build() if verdict.scope in ("request", "batch") else None
            self._post(EngineFault(error, verdict, suspects, marked, rebuilt))
            return rebuilt if rebuilt is not None and self._passes(canary) else None

    def _passes(self, canary: Canary) -> bool:
        """True if the test prompts of the canary still give the right tokens, after a fault that
        the loaded model seemed to survive; otherwise posts an EngineFault."""
        try:
            canary.check(self._counters)
        except (Exception, SystemExit) as error:
            self._post(EngineFault(error, classify_exception(error)))
            return False
        return True

    def _build_engine(self, loaded: LoadedModel, budget: Budget, canary: Canary) -> Engine:
        settings = self._settings
        return Engine(
            loaded.model,
            loaded.probe.width,
            budget=budget,
            chunks=ChunkSizer(settings.prefill_alone_s, settings.prefill_shared_s),
            prefixes=PrefixCache(settings.prefix_cache or budget.kv_bytes // 4),
            emit=self._post,
            new_cache=loaded.new_cache,
            batchable=loaded.probe.batchable,
            padding_safe=loaded.probe.padding_safe,
            mixed_states=loaded.probe.mixed_states,
            cuttable=loaded.probe.cuttable,
            bucketed=loaded.bucketed,
            pass_cost_tokens=pass_cost_tokens(
                loaded.card.weight_bytes, loaded.probe.cost.per_token
            ),
            counters=self._counters,
            when_idle=partial(canary.check, self._counters),
            idle_s=settings.canary_interval_s,
            breadcrumbs=self._breadcrumbs,
        )
