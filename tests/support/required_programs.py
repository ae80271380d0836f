"""Programs that some tests need and that do not come with Python."""

from __future__ import annotations

import os
import shutil

import pytest


def require_program(program: str) -> str:
    """Returns a program's path. Without it a test is skipped, or fails if ``REQUIRED_TOOLS`` (set
    in CI) names it."""
    found = shutil.which(program)
    if found is not None:
        return found
    if program in os.environ.get("REQUIRED_TOOLS", "").split():
        pytest.fail(f"{program} is missing")
    pytest.skip(f"{program} is missing; Debian has it in the package prometheus")
