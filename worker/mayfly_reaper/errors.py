"""What keeps a node from starting."""

from __future__ import annotations


class StartError(Exception):
    """The text says what is in the way and what to do about it."""
