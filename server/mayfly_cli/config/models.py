"""Models as they are configured, and as they are served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mayfly_cli.config.keys import Values, build, field_values
from mayfly_cli.config.loading import ConfigurationError
from mayfly_protocol.settings import WorkerSettings
from mayfly_reaper.settings import Pool


@dataclass(frozen=True)
class ConfiguredModel:
    """A model to serve: its configured values, and the folder and name of the fetched model."""

    values: Values
    path: Path
    fetched_name: str

    @property
    def name(self) -> str:
        return self.values["name"] or self.fetched_name

    @property
    def pool(self) -> Pool:
        """The settings of this model's workers."""
        return build(
            Pool,
            self.values,
            model_name=self.name,
            model_path=self.path,
            options=field_values(WorkerSettings, self.values),
        )


def aliases_of(models: Iterable[ConfiguredModel]) -> dict[str, str]:
    """Returns the model's name for each alias. Raises ConfigurationError if two models have the
    same name or alias."""
    models = list(models)
    names = [*(model.name for model in models)]
    names += [alias for model in models for alias in model.values["aliases"]]
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigurationError(
                f"{count} models would be called {name!r}: give each a name of its own, "
                "as name = ... in its [[models]] table"
            )
    return {alias: model.name for model in models for alias in model.values["aliases"]}


def aliases_by_path(tables: Iterable[Values]) -> dict[str, str]:
    """Returns the model's name for each alias, for a front end that has fetched no model: the
    table's name, or the last part of its path, as nodes name it."""
    return {
        alias: table["name"] or table["path"].rstrip("/").rpartition("/")[2]
        for table in tables
        for alias in table["aliases"]
    }
