"""Names of environment variables that hold keys in clear; no worker gets any of them."""

from __future__ import annotations

API_KEYS_VARIABLE = "MAYFLY_API_KEYS"
"""A server's API keys, separated by commas."""
ADMIN_KEY_VARIABLE = "MAYFLY_ADMIN_KEY"
"""A server's admin key, which also operates and observes it."""
API_KEY_VARIABLE = "MAYFLY_API_KEY"
"""The API key that a client sends."""

SECRET_VARIABLES = (API_KEYS_VARIABLE, ADMIN_KEY_VARIABLE, API_KEY_VARIABLE)
