"""Writes JSON schemas as llguidance reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher

from execution.text.constraint import ConstraintRefused


def parse_schema(text: str) -> Mapping[str, Any]:
    """Reads a schema; raises ValueError if the text is none, and ConstraintRefused if no value matches it."""
    return accept_schema(json.loads(text))


def accept_schema(schema: object) -> Mapping[str, Any]:
    """Returns a schema as an object; raises ConstraintRefused if it is none, or no value matches it."""
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ConstraintRefused("no value matches false" if schema is False else "a schema is an object")
    return schema


def write_schema(schema: Mapping[str, Any], *, has_whitespace: bool, is_spaced: bool = False) -> dict[str, Any]:
    """Writes the grammar of a schema, as `read_grammar` returns it.

    JSON may have white space where JSON allows it, or else has none, or if `is_spaced` one space behind each comma and
    colon, as chat templates write it.
    """
    is_spaced = is_spaced and not has_whitespace
    # What a schema says to the library itself, under `x-guidance`, must not loosen it.
    return read_grammar(
        LLMatcher.grammar_from_json_schema(
            dict(schema),
            overrides={
                "item_separator": ", " if is_spaced else ",",
                "key_separator": ": " if is_spaced else ":",
                "whitespace_flexible": has_whitespace,
                "coerce_one_of": False,
                "lenient": False,
            },
        )
    )


def read_grammar(written: str) -> dict[str, Any]:
    """Reads the only grammar that the library has written."""
    (grammar,) = json.loads(written)["grammars"]
    return {name: value for name, value in grammar.items() if value is not None}
