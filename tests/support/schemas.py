"""JSON schemas for tests of structured output. Documents that follow these schemas have a bounded
length, so even a random-weight model's output ends by itself.

:data:`SCHEMAS` maps a name to a schema. Strings have a ``maxLength`` or a pattern that ends, arrays
a ``maxItems``, numbers a range, objects no additional properties, recursion a bound.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def record(required: list[str] | None = None, /, **properties: Schema) -> Schema:
    """Returns a JSON schema of an object with exactly these properties; without a list
    ``required``, all of them are required."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


def array(items: Schema, least: int, most: int) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def integer(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def pattern(expression: str) -> Schema:
    return {"type": "string", "pattern": expression}


WORD: Schema = {"type": "string", "minLength": 1, "maxLength": 8}
BOOLEAN: Schema = {"type": "boolean"}
COLOUR: Schema = {"enum": ["red", "green", "blue"]}
POINT = record(x=integer(-9, 9), y=integer(-9, 9))

SCHEMAS: dict[str, Schema] = {
    # Scalars
    "boolean": BOOLEAN,
    "null": {"type": "null"},
    "integer in a range": integer(-17, 1234),
    "integer with exclusive bounds": {
        "type": "integer",
        "exclusiveMinimum": 5,
        "exclusiveMaximum": 12,
    },
    "multiple": {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 7},
    "number in a range": record(n={"type": "number", "minimum": -1.5, "maximum": 2.25}),
    "short string": {"type": "string", "maxLength": 5},
    "string of a length": {"type": "string", "minLength": 3, "maxLength": 3},
    # Patterns and formats
    "date pattern": pattern(r"^\d{4}-\d{2}-\d{2}$"),
    "alternatives in a pattern": pattern(r"^(yes|no|maybe){1,2}$"),
    "pattern with quotes and backslashes": pattern(r'^"[a-c]{2}\\\\[/"]$'),
    "pattern of a phone number": record(phone=pattern(r"^\+[1-9][0-9]{6,9}$")),
    "date": {"type": "string", "format": "date"},
    "time of day": record(at={"type": "string", "format": "date-time", "maxLength": 25}),
    "uuid": {"type": "string", "format": "uuid"},
    "address": {"type": "string", "format": "ipv4"},
    # Enums and constants
    "enum": COLOUR,
    "enum of several types": {"enum": ["one", 2, None, True, 3.5, {"a": [1]}, []]},
    "constant": {"const": {"kind": "fixed", "list": [1, 2]}},
    "constant member": record(kind={"const": "point"}, at=POINT),
    # Unicode
    "unicode enum": {"enum": ["naïve", "日本", "🦄", 'quo"te', "back\\slash", "new\nline"]},
    "unicode keys": record(**{"größe": integer(1, 5), "名前": COLOUR, "🦄": BOOLEAN}),
    "unicode pattern": pattern("^[äöü日本🦄]{1,4}$"),
    "any short text": record(text={"type": "string", "maxLength": 12}),
    # Objects
    "flat": record(ok=BOOLEAN, name=WORD, age=integer(0, 150)),
    "optional members": record(["a"], a=BOOLEAN, b=WORD, c=integer(0, 9)),
    "all optional": record([], a=BOOLEAN, b=WORD, c=COLOUR),
    "empty object": record(),
    "nested": record(a=record(b=record(c=record(d=COLOUR)))),
    "alpha and beta": record(alpha=array(WORD, 3, 3), beta=COLOUR),
    "awkward names": record(**{"a b": BOOLEAN, 'q"': BOOLEAN, "": COLOUR, "a/b~c": BOOLEAN}),
    "pattern properties": {
        "type": "object",
        "properties": {"id": integer(1, 9)},
        "required": ["id"],
        "patternProperties": {"^x[0-9]$": BOOLEAN},
        "additionalProperties": False,
        "maxProperties": 1,
    },
    # Arrays
    "array of a length": array(BOOLEAN, 4, 4),
    "empty or not": array(COLOUR, 0, 3),
    "array of objects": array(record(k=COLOUR, v=integer(0, 9)), 1, 3),
    "matrix": array(array(integer(0, 1), 2, 2), 2, 2),
    "tuple": {
        "type": "array",
        "prefixItems": [WORD, integer(0, 9), BOOLEAN],
        "items": False,
        "minItems": 3,
    },
    "tuple and a tail": {
        "type": "array",
        "prefixItems": [BOOLEAN],
        "items": integer(0, 9),
        "minItems": 2,
        "maxItems": 4,
    },
    # Combinations
    "any of": {"anyOf": [BOOLEAN, COLOUR, POINT]},
    "nullable": record(name={"anyOf": [WORD, {"type": "null"}]}),
    "several types": {"type": ["boolean", "null"]},
    "one of, told apart by a constant": {
        "oneOf": [
            record(kind={"const": "circle"}, radius=integer(1, 9)),
            record(kind={"const": "square"}, side=integer(1, 9)),
        ]
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": integer(0, 50)}, "required": ["a"]},
            {"properties": {"a": integer(20, 90)}, "additionalProperties": False},
        ]
    },
    # References
    "definition": {
        "$defs": {"p": POINT},
        **record(a={"$ref": "#/$defs/p"}, b={"$ref": "#/$defs/p"}),
    },
    "draft 7 definitions": {
        "definitions": {"c": COLOUR},
        **array({"$ref": "#/definitions/c"}, 1, 2),
    },
    "definition of definitions": {
        "$ref": "#/$defs/line",
        "$defs": {"line": record(a={"$ref": "#/$defs/p"}, b={"$ref": "#/$defs/p"}), "p": POINT},
    },
    "reference to a member": record(a=POINT, b={"$ref": "#/properties/a"}),
    "bounded recursion": {
        "$defs": {
            "leaf": COLOUR,
            "twig": array({"$ref": "#/$defs/leaf"}, 1, 2),
            "branch": {"anyOf": [{"$ref": "#/$defs/twig"}, {"$ref": "#/$defs/leaf"}]},
        },
        **record(tree=array({"$ref": "#/$defs/branch"}, 1, 2)),
    },
    # As they are met in the wild
    "annotated": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Fact",
        "description": "A fact.",
        **record(
            ok={"type": "boolean", "description": "Is it?", "default": False, "examples": [True]}
        ),
    },
    "from pydantic": {
        "$defs": {"Pet": {**record(["name"], name=WORD, age=integer(0, 30)), "title": "Pet"}},
        "title": "Owner",
        **record(
            ["pets"],
            pets=array({"$ref": "#/$defs/Pet"}, 1, 2),
            phone={"anyOf": [pattern("^[0-9]{3}$"), {"type": "null"}], "default": None},
        ),
    },
    "weather call": record(
        name={"const": "get_weather"},
        arguments=record(["city"], city=WORD, unit={"enum": ["celsius", "fahrenheit"]}),
    ),
}
