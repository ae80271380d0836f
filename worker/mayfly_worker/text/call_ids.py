"""Ids of tool calls: made for clients, and read back from conversations.

The id of a call is equal on every worker that runs the request, and occurs once in a conversation.
Some models write ids of their own, such as ``functions.get_weather:0``, which repeat from answer to
answer, and have characters that not every API takes in an id. A client is therefore given an id of
this server's making, with the model's own inside it in base64; the chat template is given the
model's own again.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re

_LONGEST = 160
"""Largest length of a model's own id, in bytes, that is kept; a tool's name is part of some ids."""

_WITH_OWN = re.compile(r"call_[0-9a-f]{12}_([A-Za-z0-9_-]+)")


def call_id(rid: str, choice: int, index: int, own: str | None = None) -> str:
    """Returns the id of a tool call, by the request's id and the indexes of the choice and of the
    call in it. ``own`` is the id that the model gave the call, if it did."""
    digest = hashlib.sha256(f"{rid}/{choice}/{index}".encode()).hexdigest()
    written = (own or "").encode("utf-8", "replace")
    if not 0 < len(written) <= _LONGEST:
        return f"call_{digest[:24]}"
    return f"call_{digest[:12]}_{base64.urlsafe_b64encode(written).decode().rstrip('=')}"


def own_id(id: str) -> str:
    """Returns the id that the model gave a call, for the ``id`` that a client was given; ``id``
    itself if it holds none."""
    found = _WITH_OWN.fullmatch(id)
    if found is None:
        return id
    text = found[1]
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode() or id
    except (binascii.Error, UnicodeDecodeError):
        return id
