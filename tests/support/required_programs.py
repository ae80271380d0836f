"""Finds external programs that some tests need, and skips or fails tests without them."""

from __future__ import annotations

import os
import shutil

import pytest


def require_program(program: str) -> str:
    """Returns a program's path. If the program is missing, skips the test, or fails the test if the
    environment variable ``REQUIRED_TOOLS`` (set in CI) names the program."""
    found = shutil.which(program)
    if found is not None:
        return found
    if program in os.environ.get("REQUIRED_TOOLS", "").split():
        pytest.fail(f"{program} is missing")
    pytest.skip(f"{program} is missing; Debian has it in the package prometheus")
