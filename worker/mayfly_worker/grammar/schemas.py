"""Says where a JSON schema is wrong, which llguidance does not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

SEARCH_S = 1.0
"""How long to compile parts of a schema in search of the one that fails."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalProperties", "additionalItems")
_UNSATISFIABLE = "Unsatisfiable"

Fault = Callable[[Any], str]
"""Compiles a schema and returns what is wrong with it, or an empty string."""


def find_fault(schema: dict[str, Any], reason: str, fault: Fault) -> tuple[str, str]:
    """The innermost part of a schema that fails in the same way as the whole, for ``reason``; or
    the innermost that was found within ``SEARCH_S``.

    Returns its place, a JSON pointer (``#/properties/age``), and what is wrong there.
    """
    place, node = "#", schema
    seen = {place}
    deadline = time.monotonic() + SEARCH_S
    while True:
        for pointer, child in _children(place, node, schema, reason):
            if time.monotonic() > deadline:
                return place, reason
            found = fault(_rooted(child, schema))
            if pointer not in seen and _same(found, reason):
                seen.add(pointer)
                place, node, reason = pointer, child, found
                break
        else:
            return place, reason


def endless(schema: dict[str, Any]) -> str | None:
    """The place of a definition that requires itself, so that no document could ever end; or None.

    A definition can end if what it requires can. That is worked out for all of them together,
    from none on upwards, until nothing changes.
    """
    places = {
        f"#/{key}/{_escaped(name)}": node for key in _MAPS[2:] for name, node in _map(schema, key)
    }
    places["#"] = schema
    ending: set[str] = set()
    while True:
        more = {p for p, node in places.items() if p not in ending and _ends(node, ending, places)}
        if not more:
            break
        ending |= more
    if "#" in ending:
        return None
    return min(places.keys() - ending, key=lambda place: (place == "#", place))


def _ends(node: Any, ending: set[str], places: dict[str, Any]) -> bool:
    if not isinstance(node, dict):
        return True
    reference = node.get("$ref")
    if reference in places and reference not in ending:
        return False
    ways = [node[key] for key in ("anyOf", "oneOf") if isinstance(node.get(key), list)]
    if any(way and not any(_ends(one, ending, places) for one in way) for way in ways):
        return False
    return all(_ends(child, ending, places) for child in _required(node))


def _required(node: dict[str, Any]) -> Iterator[Any]:
    """Subschemas that every document of this schema has a value of (types left aside: one that
    may be something else than an object or an array is taken to end)."""
    if isinstance(node.get("allOf"), list):
        yield from node["allOf"]
    if node.get("type") == "object":
        properties = dict(_map(node, "properties"))
        required = node.get("required")
        names = required if isinstance(required, list) else []
        yield from (properties[name] for name in names if name in properties)
    least = node.get("minItems")
    if node.get("type") == "array" and isinstance(least, int | float) and least > 0:
        first = node.get("prefixItems")
        items = first[: int(least)] if isinstance(first, list) else []
        yield from items
        if len(items) < least:
            yield node.get("items")


def _children(
    place: str, node: Any, schema: dict[str, Any], reason: str
) -> Iterator[tuple[str, Any]]:
    """The subschemas of a schema, with their pointers."""
    if not isinstance(node, dict):
        return
    required = node.get("required")
    for key in _MAPS:
        for name, child in _map(node, key):
            optional = not isinstance(required, list) or name not in required
            if key == "properties" and optional and reason.startswith(_UNSATISFIABLE):
                continue  # harmless: it is only never there
            yield f"{place}/{key}/{_escaped(name)}", child
    for key in _LISTS:
        children = node.get(key)
        for n, child in enumerate(children if isinstance(children, list) else []):
            yield f"{place}/{key}/{n}", child
    for key in _SINGLES:
        if key in node:
            yield f"{place}/{key}", node[key]
    reference = node.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target = _resolve(reference, schema)
        if target is not None:
            yield reference, target


def _same(found: str, reason: str) -> bool:
    """Whether a part's fault is the whole's: the text is the same wherever it is met, but that an
    unsatisfiable part has its own reason."""
    both = found.startswith(_UNSATISFIABLE) and reason.startswith(_UNSATISFIABLE)
    return bool(found) and (found == reason or both)


def _rooted(node: Any, schema: dict[str, Any]) -> Any:
    """A part on its own, with the definitions that it may refer to."""
    if not isinstance(node, dict):
        return node
    return {**{key: schema[key] for key in _MAPS[2:] if key in schema}, **node}


def _map(node: dict[str, Any], key: str) -> list[tuple[str, Any]]:
    children = node.get(key)
    return list(children.items()) if isinstance(children, dict) else []


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _resolve(reference: str, schema: Any) -> Any:
    for name in reference.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and name.isdigit() and int(name) < len(schema):
            schema = schema[int(name)]
        elif isinstance(schema, dict) and name in schema:
            schema = schema[name]
        else:
            return None
    return schema
