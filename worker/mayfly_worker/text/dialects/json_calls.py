"""Parses tool calls that are JSON."""

from __future__ import annotations

import json
from typing import Any


def parse_json_calls(text: str, tools: Any = None) -> Any:
    """Parses ``[{"name": …, "arguments": {…}}, …]``, the form that the grammar prescribes if a
    request forces tool calls."""
    return json.loads(text)
