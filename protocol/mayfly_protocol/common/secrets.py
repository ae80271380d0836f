"""Variables of the environment that hold keys in clear. No worker gets any of them."""

from __future__ import annotations

API_KEYS_VARIABLE = "MAYFLY_API_KEYS"
"""A server's: the keys that open it, separated by commas."""
ADMIN_KEY_VARIABLE = "MAYFLY_ADMIN_KEY"
"""A server's: the key that also operates and observes it."""
API_KEY_VARIABLE = "MAYFLY_API_KEY"
"""A client's: the key that it sends."""

SECRET_VARIABLES = (API_KEYS_VARIABLE, ADMIN_KEY_VARIABLE, API_KEY_VARIABLE)
