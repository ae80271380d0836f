"""The configured models: their worker settings, and the names and aliases for clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mayfly_cli.config.keys import Values, build, field_values
from mayfly_cli.config.loading import ConfigurationError
from mayfly_protocol.common.model_names import folder_model_name
from mayfly_protocol.settings import WorkerSettings
from mayfly_reaper.settings import Pool


@dataclass(frozen=True)
class ConfiguredModel:
    """A model to serve: the values of its configuration keys, the local folder of the fetched
    model, and the model's own name."""

    values: Values
    path: Path
    fetched_name: str

    @property
    def name(self) -> str:
        return self.values["name"] or self.fetched_name

    @property
    def pool(self) -> Pool:
        """The settings of the workers that serve this model."""
        return build(
            Pool,
            self.values,
            model_name=self.name,
            model_path=self.path,
            options=field_values(WorkerSettings, self.values),
        )


def aliases_of(models: Iterable[ConfiguredModel]) -> dict[str, str]:
    """Returns a mapping from each alias to the name of its model. Raises ConfigurationError if a
    name or alias belongs to two models, or has characters that terminals obey."""
    models = list(models)
    names = [*(model.name for model in models)]
    names += [alias for model in models for alias in model.values["aliases"]]
    for name, count in Counter(names).items():
        if not name.isprintable():
            raise ConfigurationError(
                f"a model would be called {name!r}, which has control characters: give it another "
                "name, as --name or name = ... in its [[models]] table"
            )
        if count > 1:
            raise ConfigurationError(
                f"{count} models would be called {name!r}: give each a name of its own, "
                "as name = ... in its [[models]] table"
            )
    return {alias: model.name for model in models for alias in model.values["aliases"]}


def aliases_by_path(tables: Iterable[Values]) -> dict[str, str]:
    """Returns a mapping from each alias to the name of its model, from ``[[models]]`` tables, for a
    front end, which does not fetch models. A model's name is the table's ``name``, or else that of
    its folder, or the last part of its repository's name, which routes to the model too."""
    return {
        alias: table["name"] or (table["path"] and folder_model_name(Path(table["path"])))
        for table in tables
        for alias in table["aliases"]
    }
