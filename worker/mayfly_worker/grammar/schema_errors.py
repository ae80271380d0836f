"""Finds the place of an error in a JSON schema, which the errors of llguidance do not name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

SEARCH_S = 1.0
"""Longest time, in seconds, for which parts of a JSON schema that fails are compiled one by one, in
search of the part that is at fault."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalProperties", "additionalItems")
_UNSATISFIABLE = "Unsatisfiable"

CompileError = Callable[[Any], str]
"""A function that compiles a JSON schema and returns its error, or an empty string if there is
none."""


def locate_error(
    schema: dict[str, Any], reason: str, compile_error: CompileError
) -> tuple[str, str]:
    """Finds the innermost part of a JSON schema that fails for the same ``reason`` as the whole
    schema. The search ends after a second (SEARCH_S) with the innermost part found by then.

    Returns the part's place, a JSON pointer (``#/properties/age``), and its error.
    """
    place, node = "#", schema
    seen = {place}
    deadline = time.monotonic() + SEARCH_S
    while True:
        for pointer, child in _children(place, node, schema, reason):
            if time.monotonic() > deadline:
                return place, reason
            found = compile_error(_rooted(child, schema))
            if pointer not in seen and _same(found, reason):
                seen.add(pointer)
                place, node, reason = pointer, child, found
                break
        else:
            return place, reason


def endless_definition(schema: dict[str, Any]) -> str | None:
    """Returns the place (a JSON pointer) of a definition in a JSON schema that requires itself, so
    that no document could ever end; None if there is none.

    A definition can end if all definitions that it requires can end. The set of definitions that
    can end is grown from the empty set until nothing changes.
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
    """Yields the subschemas of which every document of the JSON schema ``node`` must have a value.
    Only the subschemas in ``allOf`` are yielded if ``type`` is neither object nor array, since a
    document of another type needs no properties or items."""
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
    """Yields the subschemas of the JSON schema ``node``, each with its JSON pointer; ``place`` is
    the JSON pointer of ``node`` itself. Optional properties are left out if ``reason``, the error
    that is searched for, says that nothing can match, since they can be left out of a document."""
    if not isinstance(node, dict):
        return
    required = node.get("required")
    for key in _MAPS:
        for name, child in _map(node, key):
            optional = not isinstance(required, list) or name not in required
            if key == "properties" and optional and reason.startswith(_UNSATISFIABLE):
                continue  # harmless: the property is left out
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
    """True if ``found``, the error of a part of a JSON schema, is ``reason``, the error of the
    whole: the texts are equal, or both say that nothing can match (such a text differs from part to
    part)."""
    both = found.startswith(_UNSATISFIABLE) and reason.startswith(_UNSATISFIABLE)
    return bool(found) and (found == reason or both)


def _rooted(node: Any, schema: dict[str, Any]) -> Any:
    """Returns a part of a JSON schema as a schema of its own, an object with the definitions of the
    whole schema, to which the part may refer. The part may be true, false, or no schema at all."""
    part = node if isinstance(node, dict) else {"allOf": [node]}
    return {**{key: schema[key] for key in _MAPS[2:] if key in schema}, **part}


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
