"""JSON schemas with the shortest value of each: fifty chosen ones, and as many drawn ones as a test wants."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Case(NamedTuple):
    """A schema and the value with the shortest text that it has."""

    schema: Any
    shortest: Any

    @property
    def text(self) -> str:
        return json.dumps(self.schema)

    @property
    def shortest_text(self) -> str:
        return json.dumps(self.shortest, separators=(",", ":"), ensure_ascii=False)


def closed(properties: dict[str, Any], required: list[str] | None = None, **rest: Any) -> dict[str, Any]:
    """An object with these properties and no others."""
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False} | rest


WORD = {"type": "string", "pattern": "^[a-z]{1,8}$"}
COLOR = {"enum": ["red", "green", "blue"]}
SMALL = {"type": "integer", "minimum": 0, "maximum": 99}
LIST = {
    "$defs": {"node": closed({"value": SMALL, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}})},
    "$ref": "#/$defs/node",
}
TREE = {"$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}}, "$ref": "#/$defs/tree"}
CIRCLE = closed({"kind": {"const": "circle"}, "radius": SMALL})
BOX = closed({"kind": {"const": "box"}, "width": SMALL, "height": SMALL})

CHOSEN = [
    Case(closed({"name": WORD}), {"name": "a"}),
    Case(closed({"name": WORD, "age": SMALL}), {"name": "a", "age": 0}),
    Case(closed({"name": WORD, "age": SMALL}, ["age"]), {"age": 0}),
    Case(closed({"on": {"type": "boolean"}, "off": {"type": "null"}}), {"on": True, "off": None}),
    Case(closed({}), {}),
    Case(closed({"a": closed({"b": closed({"c": SMALL})})}), {"a": {"b": {"c": 0}}}),
    Case(
        closed({"a": {"type": "array", "items": closed({"b": COLOR}), "minItems": 1, "maxItems": 3}}),
        {"a": [{"b": "red"}]},
    ),
    Case({"type": "object", "additionalProperties": SMALL, "minProperties": 1, "maxProperties": 1}, {"": 0}),
    Case({"type": "object", "patternProperties": {"^x_[a-z]{1,3}$": SMALL}, "additionalProperties": False}, {}),
    Case(
        {
            "type": "object",
            "properties": {"a": SMALL},
            "required": ["a"],
            "additionalProperties": False,
            "title": "T",
            "description": "d",
        },
        {"a": 0},
    ),
    Case(closed({"id": {"type": "string", "format": "uuid"}}), {"id": "00000000-0000-0000-0000-000000000000"}),
    Case({"type": "string", "format": "date"}, "0000-01-01"),
    Case({"type": "string", "format": "time"}, "00:00:00Z"),
    Case({"type": "string", "format": "date-time"}, "0000-01-01T00:00:00Z"),
    Case({"type": "string", "format": "ipv4"}, "0.0.0.0"),
    Case({"type": "string", "pattern": "^[a-c]{2,4}$"}, "aa"),
    Case({"type": "string", "pattern": "^(cat|dog)s?$"}, "cat"),
    Case({"type": "string", "pattern": "^\\d{3}-\\d{4}$"}, "000-0000"),
    Case({"type": "string", "pattern": "^[A-Z][a-z]{1,5}( [A-Z][a-z]{1,5}){0,2}$"}, "Aa"),
    Case({"type": "string", "pattern": '^[^"\\\\]{1,6}$', "maxLength": 6}, "a"),
    Case({"type": "string", "minLength": 2, "maxLength": 6}, "aa"),
    Case({"type": "string", "minLength": 0, "maxLength": 4}, ""),
    Case({"type": "string", "enum": ["é", "日本", 'a"b', "c\\d", "e\nf"]}, "é"),
    Case({"enum": [1, "one", None, True, [1], {"one": 1}]}, 1),
    Case({"const": {"a": [1, 2, {"b": None}]}}, {"a": [1, 2, {"b": None}]}),
    Case({"type": "integer", "minimum": -5, "maximum": 120}, 0),
    Case({"type": "integer", "exclusiveMinimum": 99, "exclusiveMaximum": 1001}, 100),
    Case({"type": "integer", "minimum": 10, "maximum": 9999, "multipleOf": 5}, 10),
    Case({"type": "number", "minimum": 0, "maximum": 1}, 0),
    Case({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 10, "multipleOf": 0.25}, 1),
    Case({"type": ["integer", "null"], "minimum": 1, "maximum": 5}, 1),
    Case({"type": ["string", "boolean"], "maxLength": 3}, ""),
    Case({"type": "boolean"}, True),
    Case({"type": "null"}, None),
    Case({"type": "array", "items": SMALL, "minItems": 2, "maxItems": 4}, [0, 0]),
    Case({"type": "array", "items": SMALL, "maxItems": 3}, []),
    Case(
        {"type": "array", "prefixItems": [WORD, SMALL, {"type": "boolean"}], "items": False, "minItems": 3},
        ["a", 0, True],
    ),
    Case({"type": "array", "prefixItems": [COLOR], "items": SMALL, "minItems": 1, "maxItems": 3}, ["red"]),
    Case({"type": "array", "items": {"type": "array", "items": COLOR, "maxItems": 2}, "maxItems": 2}, []),
    Case({"anyOf": [SMALL, WORD, {"type": "null"}]}, 0),
    Case({"anyOf": [CIRCLE, BOX]}, {"kind": "circle", "radius": 0}),
    Case({"oneOf": [CIRCLE, BOX]}, {"kind": "circle", "radius": 0}),
    Case(
        closed({"shape": {"oneOf": [CIRCLE, BOX]}, "color": COLOR}),
        {"shape": {"kind": "box", "width": 0, "height": 0}, "color": "red"},
    ),
    Case({"allOf": [closed({"a": SMALL, "b": SMALL}, ["a"]), {"type": "object", "required": ["b"]}]}, {"a": 0, "b": 0}),
    Case({"allOf": [SMALL, {"minimum": 20}]}, 20),
    Case(LIST, {"value": 0, "next": None}),
    Case(TREE, []),
    Case(
        {
            "definitions": {"c": COLOR},
            "type": "array",
            "items": {"$ref": "#/definitions/c"},
            "minItems": 1,
            "maxItems": 2,
        },
        ["red"],
    ),
    Case({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": SMALL}, "$ref": "#/$defs/a", "minimum": 5}, 5),
    Case(
        closed(
            {
                "name": WORD,
                "arguments": closed({"city": COLOR, "days": {"type": "integer", "minimum": 1, "maximum": 9}}),
            }
        ),
        {"name": "a", "arguments": {"city": "red", "days": 1}},
    ),
]


def generate(count: int, seed: int) -> Iterator[Case]:
    """Draws schemas; a seed draws the same ones each time."""
    drawn = random.Random(seed)
    for _ in range(count):
        yield _draw_object(drawn, depth=2)


def _draw(drawn: random.Random, depth: int) -> Case:
    makers: list[Callable[[], Case]] = [
        lambda: _draw_string(drawn),
        lambda: _draw_number(drawn),
        lambda: drawn.choice([Case({"type": "boolean"}, True), Case({"type": "null"}, None), Case(COLOR, "red")]),
    ]
    if depth:
        makers += [
            lambda: _draw_object(drawn, depth - 1),
            lambda: _draw_array(drawn, depth - 1),
            lambda: _draw_union(drawn, depth - 1),
        ]
    return drawn.choice(makers)()


def _draw_object(drawn: random.Random, depth: int) -> Case:
    names = drawn.sample(["id", "name", "size", "tags", "when", "é", "a b", "x-y"], drawn.randint(1, 4))
    cases = {name: _draw(drawn, depth) for name in names}
    required = [name for name in names if drawn.random() < 0.8]
    schema = closed({name: case.schema for name, case in cases.items()}, required)
    return Case(schema, {name: cases[name].shortest for name in required})


def _draw_array(drawn: random.Random, depth: int) -> Case:
    item, smallest = _draw(drawn, depth), drawn.randint(0, 2)
    largest = smallest + drawn.randint(0, 2)
    schema = {"type": "array", "items": item.schema, "minItems": smallest, "maxItems": largest}
    return Case(schema, [item.shortest] * smallest)


def _draw_union(drawn: random.Random, depth: int) -> Case:
    cases = [_draw(drawn, depth) for _ in range(drawn.randint(2, 3))]
    shortest = min(cases, key=lambda case: len(case.shortest_text))
    return Case({"anyOf": [case.schema for case in cases]}, shortest.shortest)


def _draw_string(drawn: random.Random) -> Case:
    smallest = drawn.randint(1, 3)
    largest = smallest + drawn.randint(0, 6)
    return drawn.choice(
        [
            Case({"type": "string", "minLength": smallest, "maxLength": largest}, "a" * smallest),
            Case({"type": "string", "pattern": f"^[a-f0-9]{{{smallest},{largest}}}$"}, "a" * smallest),
            Case({"type": "string", "format": "date"}, "0000-01-01"),
            Case({"enum": ["low", "middle", "high"]}, "low"),
        ]
    )


def _draw_number(drawn: random.Random) -> Case:
    smallest = drawn.randint(-50, 50)
    largest = smallest + drawn.randint(1, 10**6)
    nearest = min(range(smallest, min(largest, smallest + 200) + 1), key=lambda number: len(str(number)))
    bounds = {"minimum": smallest, "maximum": largest}
    return drawn.choice(
        [
            Case({"type": "integer", **bounds}, nearest),
            Case({"type": "number", **bounds, "multipleOf": 0.5}, nearest),
            Case({"const": smallest}, smallest),
        ]
    )
