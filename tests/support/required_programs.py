"""Programs that some tests need and that Python doesn't bring."""

from __future__ import annotations

import os
import shutil

import pytest


def require_program(program: str) -> str:
    """Where a program is. Without it a test is skipped, but where it has to be there (CI names it
    in ``REQUIRED_TOOLS``) the test fails."""
    found = shutil.which(program)
    if found is not None:
        return found
    if program in os.environ.get("REQUIRED_TOOLS", "").split():
        pytest.fail(f"{program} is missing")
    pytest.skip(f"{program} is missing; Debian has it in the package prometheus")
