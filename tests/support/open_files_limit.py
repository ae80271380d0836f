"""Keeps mlx-lm from changing this process's limit of open files.

``mlx_lm.utils`` sets the soft and the hard limit to 4096 in any process that imports it. All
processes that tests start would inherit this limit, and a front end would have fewer files than in
production. Import this module before any module that imports mlx-lm. This module does not import
mlx-lm itself, because the import takes a second and many tests do without.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from unittest.mock import patch


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "mlx_lm.utils":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def without_limit(module: ModuleType) -> None:
                with patch("resource.setrlimit"):
                    execute(module)

            spec.loader.exec_module = without_limit  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
