"""Loads a model folder into memory, and reports progress.

::

    weight files -> page cache -> lazy model -> layer by layer into memory -> model card

The weight files are read into the page cache before MLX opens them
(:mod:`mayfly_worker.model.page_cache`). Then parameters are evaluated layer by layer, so that no
single command is large and progress is known in bytes. Everything but the reading of the files runs
on the engine thread.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import structlog
from mlx.utils import tree_flatten
from mlx_lm.utils import load_adapters, load_config, load_model, load_tokenizer
from transformers import CONFIG_MAPPING, PreTrainedConfig

from mayfly_protocol.lifecycle import LoadPhase, ModelCard
from mayfly_protocol.settings import WorkerSettings
from mayfly_worker.engine import caches
from mayfly_worker.model.capabilities import capabilities_of
from mayfly_worker.model.generation_config import recommended
from mayfly_worker.model.json_files import check_tokenizer_files, json_object
from mayfly_worker.model.model_config import TranslatedConfig, ignored_window
from mayfly_worker.model.page_cache import WeightReader
from mayfly_worker.model.probe import UNABLE, Probe, bounded_as_unbounded, probe
from mayfly_worker.model.reference_store import ReferenceStore
from mayfly_worker.model.weight_files import (
    ModelLoadError,
    check_weights,
    only_weight_files,
    weight_files,
)
from mayfly_worker.text.dialects.registry import (
    AUTO,
    NONE,
    choose_format,
    dialect_named,
    thought_named,
)

ReportProgress = Callable[[LoadPhase, int, int], None]
"""Callback for the progress of loading: phase, bytes done, bytes in all."""

_SAMPLE = 1 << 20
_METAL_ONLY = "[metal_kernel] No Metal back-end"
"""Beginning of the error by which MLX refuses a kernel that is written for Metal."""
_log = structlog.get_logger()

TERSE = (KeyError, IndexError, AttributeError, AssertionError, ZeroDivisionError)
"""Exceptions whose texts are hard to understand without their types."""
CANNOT_LOAD = (
    ValueError,
    TypeError,
    FileNotFoundError,
    IsADirectoryError,
    ImportError,
    RecursionError,
    *TERSE,
)
"""Exceptions of mlx-lm and transformers that mean that a folder cannot be loaded, now or later."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, with its tokenizer, its card (properties that front ends need), its probe
    (properties found by running a few tokens), and a function that makes its empty KV caches."""

    model: Any
    tokenizer: Any
    card: ModelCard
    probe: Probe
    new_cache: caches.Factory

    @property
    def bucketed(self) -> bool:
        """True if prompts are padded to a few lengths in prefill, which is of use where MLX runs on
        CUDA."""
        return bool(mx.cuda.is_available())


def load(
    settings: WorkerSettings, report: ReportProgress, reader: WeightReader | None = None
) -> LoadedModel:
    """Loads the model that the settings name; ``reader`` may have begun to read its weight files.

    Raises:
        ModelLoadError: the folder is incomplete, needs to run Python code of its own without
            permission, or an option does not fit the model.
    """
    folder = Path(settings.model_path)
    _check(folder, settings)
    _check_limit(folder, settings.memory_limit)
    reader = reader or WeightReader(weight_files(folder))
    reader.follow(partial(report, "warming"))
    report("loading", 0, 0)
    model, tokenizer, config = assemble(settings)
    weight_bytes = materialize(model, report)
    new_cache = cache_factory(model, config, settings)
    sampling = recommended(folder) if settings.generation_config == "auto" else {}
    if settings.max_kv_size is not None and not bounded_as_unbounded(model, new_cache):
        raise ModelLoadError(
            "max_kv_size changes the answers of this model even where nothing has to be dropped, "
            "because its code relies on how its own caches work; leave the option out"
        )
    identity = digest(folder, settings, sampling)
    with run_errors(settings):
        found = probe(model, new_cache, ReferenceStore.of(settings.canary_dir, identity))
    can = capabilities_of(tokenizer, config, settings, new_cache(), found)
    if can.one_row_because:
        _log.warning("the model runs one sequence at a time", reason=can.one_row_because)
    if can.chat and not can.tools and settings.tool_parser != NONE:
        _log.warning(
            "the model's tool calls are left in its text",
            reason="its chat template takes tools, and no tool parser is known for its words; "
            "--tool-parser names one, and tool_choice 'required' works without",
        )
    if found.batchable and not found.mixed_states:
        _log.info(
            "sequences that begin with a token or two are decoded apart from longer ones",
            reason="this model's layers take an empty state for another than zeros",
        )
    card = ModelCard(
        **asdict(can),
        digest=identity,
        architecture=str(config.get("model_type", "")),
        vocabulary=found.width,
        kv_bytes_per_token=found.cost.per_token,
        weight_bytes=weight_bytes,
        sampling=sampling,
    )
    return LoadedModel(model, tokenizer, card, found, new_cache)


def assemble(settings: WorkerSettings) -> tuple[Any, Any, dict[str, Any]]:
    """Returns a model whose weights are still on the disk, its tokenizer, and its configuration.

    Raises:
        ModelLoadError: the folder is incomplete, needs to run Python code of its own without
            permission, or cannot be read by mlx-lm.
    """
    folder = Path(settings.model_path)
    _check(folder, settings)
    trust = settings.trust_remote_code
    with _load_errors(folder.name):
        translated = TranslatedConfig(folder, load_config(folder))
        with only_weight_files(folder) as view:
            model, config = load_model(
                view, lazy=True, model_config=translated.changes, trust_remote_code=trust
            )
        translated.check(model)
        if settings.adapter:
            model = load_adapters(model, settings.adapter)
            model.eval()
        tokenizer = _load_tokenizer(folder, config, trust=trust)
        choose_format(tokenizer, settings.tool_parser, settings.reasoning_parser)
    return model, tokenizer, config


def _load_tokenizer(folder: Path, config: dict[str, Any], *, trust: bool) -> Any:
    # Without this setting the tokenizer would ask on stdin for leave to run remote code.
    options: dict[str, Any] = {"trust_remote_code": trust}
    if config.get("model_type") not in CONFIG_MAPPING and not (trust and config.get("auto_map")):
        # Of a type of model that transformers does not know, it reads the tokenizer's class alone,
        # and yet refuses configurations by rules for models that it knows.
        options["config"] = PreTrainedConfig(tokenizer_class=config.get("tokenizer_class"))
    try:
        return load_tokenizer(folder, options, eos_token_ids=config.get("eos_token_id"))
    except (OSError, MemoryError, *CANNOT_LOAD):
        raise
    except Exception as error:  # the tokenizers library raises no more special ones
        raise ModelLoadError(f"{folder.name}: the tokenizer cannot be loaded: {error}") from error


@contextmanager
def _load_errors(name: str) -> Iterator[None]:
    """Context in which every error that means that a folder cannot be loaded becomes a
    ModelLoadError.

    Some of mlx-lm's modules, and code that comes with a model, print that a package is missing and
    end the program: their words become the error's.
    """
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
    except ModelLoadError:
        raise
    except CANNOT_LOAD as error:
        # Without its type, the text of a KeyError would be the key alone.
        words = f"{type(error).__name__}: {error}" if type(error) in TERSE else error
        raise ModelLoadError(f"{name} cannot be loaded: {words}") from error
    except SystemExit as error:
        words = error.code if isinstance(error.code, str) else printed.getvalue().strip()
        raise ModelLoadError(
            f"{name} cannot be loaded: its code ended the program"
            + (f": {words}" if words else f" with status {error.code}")
        ) from error
    finally:
        sys.stdout.write(printed.getvalue())


def _check_limit(folder: Path, limit: int) -> None:
    size = sum(file.stat().st_size for file in weight_files(folder))
    if limit and limit <= size:
        raise ModelLoadError(
            f"{folder.name} has weights of {size / 1e9:.3g} GB, and memory_limit is "
            f"{limit / 1e9:.3g} GB: raise it, or leave it out"
        )


def _check(folder: Path, settings: WorkerSettings) -> None:
    try:
        if settings.tool_parser != AUTO:
            dialect_named(settings.tool_parser)
        if settings.reasoning_parser != AUTO:
            thought_named(settings.reasoning_parser)
    except ValueError as error:
        raise ModelLoadError(str(error)) from error
    config = json_object(folder / "config.json")
    check_weights(folder)
    recommended(folder)
    check_tokenizer_files(folder)
    if settings.trust_remote_code:
        return
    tokenizer_config = folder / "tokenizer_config.json"
    tokenizer = json_object(tokenizer_config) if tokenizer_config.exists() else {}
    if config.get("model_file"):
        code = "a model"
    elif tokenizer.get("auto_map"):
        code = "a tokenizer"
    else:
        return
    raise ModelLoadError(
        f"{folder.name} contains {code} that is Python code of its own. It is not run unless you "
        "trust it: start with --trust-remote-code"
    )


def cache_factory(model: Any, config: dict[str, Any], settings: WorkerSettings) -> caches.Factory:
    """Returns a function that makes empty KV caches for this model.

    Raises:
        ModelLoadError: ``max_kv_size``, ``kv_bits`` or ``kv_group_size`` is set, and has no effect
            on this model's caches or does not fit them.
    """
    kind = config.get("model_type")
    if window := ignored_window(config, settings.context):
        for option in ("max_kv_size", "kv_bits"):
            if getattr(settings, option) is not None:
                raise ModelLoadError(
                    f"{option} has no effect on this {kind} model, each of whose layers has a "
                    f"window of {window} tokens; leave the option out"
                )
        return caches.windowed(model, window)
    if settings.max_kv_size is not None and not caches.can_be_bounded(model):
        raise ModelLoadError(
            f"max_kv_size has no effect on a {kind} model: some of its layers keep a window or "
            "a state of their own; leave the option out"
        )
    new_cache = caches.factory(
        model, settings.max_kv_size, settings.kv_bits, settings.kv_group_size
    )
    if settings.kv_bits is None:
        if settings.kv_group_size is not None:
            raise ModelLoadError("kv_group_size has no effect without kv_bits; leave it out")
        return new_cache
    if not caches.quantized(new_cache()):
        bounded = " that max_kv_size bounds" if settings.max_kv_size is not None else ""
        raise ModelLoadError(
            f"kv_bits has no effect on the cache of a {kind} model{bounded}; leave the option out"
        )
    try:
        # A forward pass that is built but not computed shows the widths of all keys and values.
        model(mx.array([[0, 0]]), cache=new_cache())
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"this model's cache cannot be quantized to {settings.kv_bits} bits: {error}; "
            "leave kv_bits out"
        ) from error
    return new_cache


@contextmanager
def run_errors(settings: WorkerSettings) -> Iterator[None]:
    """Context in which every error that means that a model cannot run any prompt becomes a
    ModelLoadError."""
    try:
        yield
    except UNABLE as error:
        raise ModelLoadError(
            f"{settings.model_name} cannot be run: its code raised {type(error).__name__}: {error}"
        ) from error
    except RuntimeError as error:
        if _METAL_ONLY not in str(error):
            raise
        raise ModelLoadError(
            f"{settings.model_name} cannot be run on this device: its code has kernels for Metal "
            "alone; serve it on a Mac"
        ) from error


def materialize(model: Any, report: ReportProgress) -> int:
    """Reads a lazy model's parameters into memory, layer by layer, and returns their size in
    bytes."""
    parameters: list[tuple[str, mx.array]] = list(tree_flatten(model.parameters()))  # type: ignore[arg-type]
    total = sum(p.nbytes for _, p in parameters)
    done = 0
    report("loading", 0, total)
    for layer in _layers(parameters):
        mx.eval(layer)
        done += sum(p.nbytes for p in layer)
        report("loading", done, total)
    return total


def _layers(parameters: list[tuple[str, mx.array]]) -> Iterator[list[mx.array]]:
    """Yields the parameters of each layer together; a parameter's name tells its layer."""
    groups: dict[str, list[mx.array]] = {}
    for name, parameter in parameters:
        match = re.match(r"(.*?\blayers\.\d+)\.", name)
        groups.setdefault(match.group(1) if match else name, []).append(parameter)
    yield from groups.values()


def digest(folder: Path, settings: WorkerSettings, sampling: dict[str, float]) -> str:
    """Returns a hash, in hexadecimal digits, of everything that decides the model's output.

    ``sampling`` are the sampling parameters of requests that name none. Small files are hashed
    whole; of a weight file, its size, its header (names, shapes, types and places of all tensors)
    and samples of its content are hashed. To hash hundreds of gigabytes at every start would take
    longer than to load them, and two different models with the same header differ everywhere.
    """
    sha = hashlib.sha256()
    folders = [folder, *([Path(settings.adapter)] if settings.adapter else [])]
    for place in folders:
        for path in sorted(p for p in place.iterdir() if p.is_file()):
            if path.suffix in {".json", ".jinja", ".py", ".model", ".txt"}:
                sha.update(path.name.encode() + path.read_bytes())
            elif path.suffix == ".safetensors":
                sha.update(path.name.encode() + _sampled(path))
    sha.update(repr((settings.kv_bits, settings.max_kv_size)).encode())
    if settings.max_kv_size is not None:
        sha.update(f"first {caches.KEPT} kept".encode())
    if settings.kv_group_size is not None:
        sha.update(f"groups of {settings.kv_group_size}".encode())
    if settings.tool_parser != AUTO:
        sha.update(settings.tool_parser.encode())
    if settings.reasoning_parser != AUTO:
        sha.update(f"thoughts: {settings.reasoning_parser}".encode())
    if sampling:
        sha.update(repr(sorted(sampling.items())).encode())
    return sha.hexdigest()[:32]


def _sampled(path: Path) -> bytes:
    size = path.stat().st_size
    sha = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for part in range(8):
            file.seek(part * max(0, size - _SAMPLE) // 7, os.SEEK_SET)
            sha.update(file.read(_SAMPLE))
    return sha.digest()
