"""Why there is no model."""

from __future__ import annotations


class FetchError(Exception):
    """The model cannot be had; the text says why and what to do, in sentences for its user."""
