"""Configuration text to a plain document, strictly."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from bundle.errors import FieldViolation
from compiler_svc.config.domains import show
from compiler_svc.errors import ConfigInvalid

#: A configuration before it is judged: what the JSON text or the message says.
Document = dict[str, Any]


def parse_document(text: str) -> Document:
    """Reads JSON text.

    Raises:
        ConfigInvalid: Text that is no JSON object, that gives a name twice, or a number that JSON does not have.
    """
    try:
        document = json.loads(text, object_pairs_hook=_unique_names, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _invalid(show(text), f"a JSON object ({error})") from error
    if not isinstance(document, dict):
        raise _invalid(show(document), 'a JSON object such as {"neuron_config": {"seq_len": 256}}')
    return document


def _unique_names(pairs: list[tuple[str, Any]]) -> Document:
    document = dict(pairs)
    if len(document) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{show(next(name for name in names if names.count(name) > 1))} is given twice")
    return document


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _invalid(value: str, accepted: str) -> ConfigInvalid:
    return ConfigInvalid([FieldViolation("config_json", value, accepted)])
