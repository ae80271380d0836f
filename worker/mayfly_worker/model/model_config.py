"""Translates a model's configuration for mlx-lm, and checks that nothing was ignored that matters.

Since its version 5, transformers writes the parameters of rotary position embeddings (RoPE) as one
object, ``rope_parameters``, for the whole model or for each type of layer. Earlier versions wrote
``rope_theta``, ``rope_scaling`` and ``partial_rotary_factor``, and most of mlx-lm's models read
these alone: they would go on with a default ``rope_theta``, which gives another text and no error.
So the earlier keys are derived here; and after the model is built, the configuration is refused if
the model's code has not read what changes the result.

``tie_word_embeddings`` has another default in some of mlx-lm's models than in transformers. If the
key is absent, the weights decide: a model with an output layer of its own (``lm_head``) uses it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.rope_utils import YarnRoPE

from mayfly_worker.model.weight_files import ModelLoadError, tensor_names, weight_files

Config = dict[str, Any]

_PLAIN = ("default", "mrope")
"""Types of RoPE that do not scale the positions of a text. (With ``mrope``, the three coordinates
of a position are equal in a text.)"""
_STRETCHED = ("yarn", "llama3", "longrope")
"""Types of RoPE that are stretched from an original context, by default the model's context."""
_EXTENDING = ("yarn", "deepseek_yarn", "telechat3-yarn", "linear", "dynamic", "llama3")
"""Types of RoPE that extend the original context by a factor."""
_FACTORS = {"factor", "long_factor", "alpha"}
"""Keys of a scaling by which the positions are scaled; each type has one of them."""
_ORIGINAL = "original_max_position_embeddings"
_NUMBER = (int, float)
_LOCAL = ("rope_local_base_freq", "rope_local_theta", "swa_rope_theta")
"""Names by which mlx-lm's models call the ``rope_theta`` of layers with a sliding window."""
_ONE_THETA = ("olmo3",)
"""Model types whose layers with a sliding window have the ``rope_theta`` of the other layers, and
no scaling."""
_WINDOWED = ("mistral", "mixtral", "phi3", "phimoe", "starcoder2")
"""Model types whose layers all have the window ``sliding_window``, which mlx-lm ignores."""
_FIXED_PART = ("glm",)
"""Model types whose part of the dimensions that is rotated is fixed in mlx-lm's code."""


class ReadRecord(dict[str, Any]):
    """A dictionary that records which of its keys were read, in ``read``; to copy it reads all."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        # Without a method of its own, dict(record) would copy the values unseen.
        return super().__iter__()

    def items(self) -> Any:
        self.read.update(self)
        return super().items()

    def copy(self) -> dict[str, Any]:
        self.read.update(self)
        return dict(super().items())


class TranslatedConfig:
    """Changes to the configuration of the model in ``folder``, for mlx-lm to apply (``changes``),
    and a check of the model that was built with them.

    Raises:
        ModelLoadError: ``text_config`` is no JSON object.
    """

    def __init__(self, folder: Path, config: Config) -> None:
        self._name = folder.name
        self._type = str(config.get("model_type"))
        self._scaled: list[ReadRecord] = []
        self._untruncated: list[tuple[Config, Any]] = []
        self._other_layers: list[Config] = []
        self._theta = self._partial = False
        self.changes = self._translated(config)
        text = config.get("text_config")
        if not isinstance(text, dict | None):
            raise ModelLoadError(f"{self._name}: text_config in config.json is not an object")
        if isinstance(text, dict):
            inner = {"max_position_embeddings": config.get("max_position_embeddings"), **text}
            self.changes["text_config"] = text | self._translated(inner)
        self._untie(folder, config, text if isinstance(text, dict) else {})

    def check(self, model: Any) -> None:
        """Checks that the code of ``model``, which mlx-lm built, has read what changes its results,
        and mends what it has not where that can be done.

        Raises:
            ModelLoadError: it has not.
        """
        known = set(_known_keys(model))
        whole = "rope_parameters" in known
        unread = []
        if self._theta and not (whole or known & {"rope_theta", "rotary_emb_base"}):
            unread.append("rope_theta")
        if self._other_layers and not (whole or (self._local_theta and known & set(_LOCAL))):
            unread.append("rope_parameters that differ between types of layers")
        rotated = {"partial_rotary_factor", "rotary_dim", "rotary_pct"}
        if self._partial and not (whole or known & rotated or self._type in _FIXED_PART):
            unread.append("partial_rotary_factor")
        if self._scaled and not any(
            scaled.read & scaled.keys() & _FACTORS for scaled in self._scaled
        ):
            unread.append(f"rope_scaling of the type {_type_of(self._scaled[0])}")
        if any(_unusual_attention_factor(scaled) for scaled in self._scaled):
            unread.append("attention_factor in its RoPE parameters")
        if not all(_untruncate(model, scaled, theta) for scaled, theta in self._untruncated):
            unread.append("truncate in its RoPE parameters")
        if unread:
            raise ModelLoadError(
                f"{self._name}: config.json has {' and '.join(unread)}, which changes what the "
                f"model answers and which mlx-lm ignores for the model type {self._type}; only a "
                "configuration without it can be served"
            )

    def _translated(self, config: Config) -> Config:
        """Returns the changes to one level of a configuration."""
        rope = config.get("rope_parameters") or {}
        layers = {name: value for name, value in rope.items() if isinstance(value, dict)}
        if layers:
            rope = layers.get("full_attention") or next(iter(layers.values()))
            self._other_layers = self._different(rope, layers)
        changes: Config = {}
        if (theta := rope.get("rope_theta")) is not None:
            self._theta = True
            changes |= {"rope_theta": theta, "rotary_emb_base": theta}
        if (part := rope.get("partial_rotary_factor")) is not None:
            self._partial = part != 1
            changes |= {"partial_rotary_factor": part, "rotary_pct": part}
        if (local := self._local_theta) is not None:
            changes |= dict.fromkeys(_LOCAL, local)
        scaling = config.get("rope_scaling") or rope
        if isinstance(scaling, dict) and (kind := _type_of(scaling)) not in _PLAIN:
            context = config.get(_ORIGINAL) or scaling.get(_ORIGINAL)
            context = context or config.get("max_position_embeddings")
            record = ReadRecord({**scaling, "type": kind, "rope_type": kind})
            if kind in _STRETCHED and context:
                dict.__setitem__(record, _ORIGINAL, context)
                changes[_ORIGINAL] = context
            changes["rope_scaling"] = record
            if layers:
                whole = {name: record if each is rope else each for name, each in layers.items()}
                changes["rope_parameters"] = whole
            elif rope:
                changes["rope_parameters"] = record
            self._scaled.append(record)
            theta = rope.get("rope_theta") or config.get("rope_theta")
            if scaling.get("truncate") is False:
                self._untruncated.append((record, theta))
        return changes

    def _different(self, full: Config, layers: dict[str, Config]) -> list[Config]:
        """Returns the RoPE parameters of types of layers that differ from those of layers with full
        attention, ``full``, in a way that the model's code does not provide for."""
        others = [each for each in layers.values() if each != full]
        if self._type in _ONE_THETA and all(
            each.get("rope_theta") == full.get("rope_theta") and _type_of(each) in _PLAIN
            for each in others
        ):
            return []
        return others

    @property
    def _local_theta(self) -> float | None:
        """The ``rope_theta`` of the layers that differ from those with full attention; None if
        there are none, or more than one value, or a scaling."""
        thetas = {each.get("rope_theta") for each in self._other_layers}
        plain = all(_type_of(each) in _PLAIN for each in self._other_layers)
        return thetas.pop() if len(thetas) == 1 and plain else None

    def _untie(self, folder: Path, config: Config, text: Config) -> None:
        if "tie_word_embeddings" in config or "tie_word_embeddings" in text:
            return
        names = {name for file in weight_files(folder) for name in tensor_names(file)}
        if any(name == "lm_head.weight" or name.endswith(".lm_head.weight") for name in names):
            self.changes["tie_word_embeddings"] = False
            if text:
                inner = self.changes.get("text_config", text)
                self.changes["text_config"] = inner | {"tie_word_embeddings": False}


def scaled_context(context: int, *configs: Config) -> int:
    """Returns the number of tokens that a model can read whose configuration names ``context``: the
    context that the scaling of RoPE makes of the original one, if that is more.

    Some authors name the scaled context as ``max_position_embeddings``, others the original one;
    ``original_max_position_embeddings`` tells them apart. Where it is absent, ``context`` is the
    original one for ``yarn`` and ``llama3``, as in transformers; for ``linear`` and ``dynamic``,
    nothing tells (Gemma 3 names the scaled one), and ``context`` is not extended. ``configs`` are
    the parts of the configuration that may have the scaling; the first that has one counts.
    """
    for config in configs:
        scaling = config.get("rope_scaling") or {}
        if _type_of(scaling) in _EXTENDING and isinstance(factor := scaling.get("factor"), _NUMBER):
            named = config.get(_ORIGINAL) or scaling.get(_ORIGINAL)
            original = named or (context if _type_of(scaling) in _STRETCHED else 0)
            return max(context, int(original * factor))
    return context


def ignored_window(config: Config, context: int | None) -> int:
    """Returns the tokens to which each token of this model attends, if the model's code in mlx-lm
    would have it attend to more within ``context`` (None: the configuration's); else 0."""
    text = config.get("text_config") or config
    window = text.get("sliding_window")
    if text.get("model_type") not in _WINDOWED or not isinstance(window, int):
        return 0
    longest = context or scaled_context(text.get("max_position_embeddings") or 0, text)
    return window if 0 < window < longest else 0


def _unusual_attention_factor(scaling: ReadRecord) -> bool:
    """True if YaRN is to scale attention by another factor than the one that mlx-lm computes from
    the factor of the context."""
    given, factor = dict.get(scaling, "attention_factor"), dict.get(scaling, "factor")
    if "attention_factor" in scaling.read or not isinstance(given, _NUMBER):
        return False
    computed = 0.1 * math.log(factor) + 1 if isinstance(factor, _NUMBER) and factor > 1 else 1.0
    return _type_of(scaling) == "yarn" and abs(given - computed) > 1e-3


def _untruncate(model: Any, scaling: Config, theta: Any) -> bool:
    """Has YaRN blend the frequencies of ``model`` between the bounds that its parameters give,
    which mlx-lm rounds outwards to whole dimensions. False if the model's code computes the
    frequencies in another way, or a parameter is missing."""
    found = False
    if not (isinstance(theta, _NUMBER) and {_ORIGINAL, "factor"} <= scaling.keys()):
        return False
    for rope in model.modules():
        if isinstance(rope, YarnRoPE):
            rounded = _yarn_wavelengths(rope.dims, scaling, theta, truncate=True)
            exact = _yarn_wavelengths(rope.dims, scaling, theta, truncate=False)
            if not any(mx.allclose(rope._freqs, known).item() for known in (rounded, exact)):
                return False
            rope._freqs = exact
            found = True
    return found


def _yarn_wavelengths(dims: int, scaling: Config, theta: float, *, truncate: bool) -> mx.array:
    """Returns the inverse frequencies of YaRN (Peng et al., 2023), one for each two dimensions, in
    tokens a radian: those with many turns in the original context as without scaling, those with
    few turns stretched by the factor, and a blend between."""

    def dimension(turns: float) -> float:
        return dims * math.log(scaling[_ORIGINAL] / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = (dimension(scaling.get(*key)) for key in (("beta_fast", 32), ("beta_slow", 1)))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    own = theta ** (mx.arange(0, dims, 2, dtype=mx.float32) / dims)
    stretched = mx.clip((mx.arange(dims // 2) - low) / max(high - low, 0.001), 0, 1)
    frequencies: mx.array = (1 - stretched) / own + stretched / (own * scaling["factor"])
    return 1 / frequencies


def _type_of(scaling: Config) -> str:
    return str(dict.get(scaling, "rope_type") or dict.get(scaling, "type") or "default")


def _known_keys(model: Any) -> Iterator[str]:
    """Yields the keys of a configuration that the code of ``model`` declares: the fields of the
    dataclasses in all modules that its layers are from."""
    for module, layer in {type(layer).__module__: type(layer) for layer in model.modules()}.items():
        # mlx-lm leaves code that comes with a model out of sys.modules.
        known = sys.modules.get(module)
        names = vars(known) if known else getattr(layer.__call__, "__globals__", {})
        for each in list(names.values()):
            if isinstance(each, type) and is_dataclass(each) and each.__module__ == module:
                yield from (field.name for field in fields(each))
