"""Names of the environment variables in which users give keys to Mayfly; the keys themselves are
not in this module. No worker gets any of these variables."""

from __future__ import annotations

API_KEYS_VARIABLE = "MAYFLY_API_KEYS"
"""Name of the environment variable that holds a server's API keys, separated by commas."""
ADMIN_KEY_VARIABLE = "MAYFLY_ADMIN_KEY"
"""Name of the environment variable that holds a server's admin key, which also allows to operate
and observe the server."""
API_KEY_VARIABLE = "MAYFLY_API_KEY"
"""Name of the environment variable that holds the API key that a client sends."""

SECRET_VARIABLES = (API_KEYS_VARIABLE, ADMIN_KEY_VARIABLE, API_KEY_VARIABLE)
