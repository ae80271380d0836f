"""Loading, running and rebuilding the engine, on the one thread that touches MLX.

::

    load --> [ canary --> build --> run ] --> leave
               ^                     |
               +-- batch scope: everything in flight was given back

A generator that raised is not used again, whatever it raised. After a fault of batch scope the
loaded model is still good and a new engine is built on it; after any other the thread ends without
another call into MLX, and the process with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mayfly_protocol.breadcrumb import BreadcrumbWriter
from mayfly_protocol.faults import Classification, classify_exception
from mayfly_protocol.lifecycle import LoadPhase, Scope
from mayfly_protocol.settings import WorkerSettings
from mayfly_worker.engine.admission import Budget
from mayfly_worker.engine.chunks import ChunkSizer
from mayfly_worker.engine.engine_counters import EngineCounters
from mayfly_worker.engine.scheduler import Engine
from mayfly_worker.engine.sequence import Event, Shutdown
from mayfly_worker.engine.sub_batches import pass_cost_tokens
from mayfly_worker.model.canary import Canary
from mayfly_worker.model.loading import LoadedModel, ModelLoadError, load
from mayfly_worker.model.memory import plan, within
from mayfly_worker.model.page_cache import WeightReader
from mayfly_worker.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class LoadProgress:
    phase: LoadPhase
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class LoadedNow:
    """The model is there; ``engine`` takes commands from now on."""

    loaded: LoadedModel
    budget: Budget
    engine: Engine


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """There will be no engine; with a fault of model scope, trying again cannot help."""

    error: BaseException
    kind: str
    scope: Scope


@dataclass(frozen=True, slots=True)
class Faulted:
    """The engine raised. ``rebuilt`` is the new one after a fault of batch scope, otherwise the
    process is to leave. ``suspects`` are the requests that may have caused it, ``marked`` the
    others of the forward pass that it came out of."""

    error: BaseException
    verdict: Classification
    suspects: tuple[str, ...]
    marked: tuple[str, ...]
    rebuilt: Engine | None


@dataclass(frozen=True, slots=True)
class Left:
    """The engine did as it was told and ended."""


Report = LoadProgress | LoadedNow | LoadFailed | Faulted | Left | list[Event]


class EngineThread:
    """``post`` takes reports to the main thread; it is called from the engine thread alone."""

    def __init__(
        self, settings: WorkerSettings, warming: WeightReader, post: Callable[[Report], None]
    ) -> None:
        self._settings = settings
        self._warming = warming
        self._post = post
        self._engine: Engine | None = None
        self._counters = EngineCounters()  # of every engine in turn: what they count must not fall
        self._breadcrumbs = (
            BreadcrumbWriter(Path(settings.breadcrumb)) if settings.breadcrumb else None
        )
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def leave(self) -> None:
        """Asks the thread to end after the turn that it is in."""
        if self._engine is not None:
            self._engine.commands.put(Shutdown())

    def _main(self) -> None:
        try:
            loaded, budget = self._load()
            self._post(LoadProgress("canary", 0, 0))
            canary = Canary.of(loaded, self._settings.canary_dir)
            canary.check()
        except ModelLoadError as error:
            self._post(LoadFailed(error, "model_load", "model"))
            return
        except Exception as error:
            verdict = classify_exception(error)
            self._post(LoadFailed(error, verdict.kind, verdict.scope))
            return
        self._engine = self._build(loaded, budget, canary)
        self._post(LoadedNow(loaded, budget, self._engine))
        while self._serve(loaded, budget, canary):
            pass

    def _serve(self, loaded: LoadedModel, budget: Budget, canary: Canary) -> bool:
        """Runs the engine until it ends; whether there is a new one to run."""
        engine = self._engine
        assert engine is not None
        try:
            engine.run()
        except Exception as error:
            verdict = classify_exception(error)
            suspects, marked = (
                engine.suspects_of(error) if verdict.blame == "suspects" else ((), ())
            )
            rebuild = verdict.scope in ("request", "batch")
            self._engine = self._build(loaded, budget, canary) if rebuild else None
            self._post(Faulted(error, verdict, suspects, marked, self._engine))
            return rebuild and self._sound(canary)
        self._post(Left())
        return False

    def _sound(self, canary: Canary) -> bool:
        """Whether the model still computes what it did, after a fault that it seemed to survive."""
        assert self._engine is not None
        try:
            canary.check(self._engine.counters)
        except Exception as error:
            self._post(Faulted(error, classify_exception(error), (), (), None))
            return False
        return True

    def _load(self) -> tuple[LoadedModel, Budget]:
        def report(phase: LoadPhase, done: int, total: int) -> None:
            self._post(LoadProgress(phase, done, total))

        loaded = load(self._settings, report, self._warming)
        budget = plan(self._settings, loaded)
        return replace(loaded, card=within(loaded.card, budget)), budget

    def _build(self, loaded: LoadedModel, budget: Budget, canary: Canary) -> Engine:
        settings = self._settings
        counters = self._counters
        return Engine(
            loaded.model,
            loaded.probe.width,
            budget=budget,
            chunks=ChunkSizer(settings.prefill_alone_s, settings.prefill_shared_s),
            prefixes=PrefixCache(settings.prefix_cache or budget.kv_bytes // 4),
            emit=self._post,
            new_cache=loaded.new_cache,
            padding_safe=loaded.probe.padding_safe,
            bucketed=loaded.bucketed,
            pass_cost_tokens=pass_cost_tokens(
                loaded.card.weight_bytes, loaded.probe.cost.per_token
            ),
            counters=counters,
            when_idle=lambda: canary.check(counters),
            idle_s=settings.canary_interval_s,
            breadcrumbs=self._breadcrumbs,
        )
