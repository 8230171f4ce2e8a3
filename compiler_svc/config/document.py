"""Parses configuration text strictly to a plain document."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any, Final

from bundle.errors import FieldViolation
from compiler_svc.config.domains import show
from compiler_svc.errors import ConfigInvalid

#: A configuration before validation: what the JSON text or the message says.
Document = dict[str, Any]

#: Of objects and lists inside each other. No document of NxD Inference or of Hugging Face comes near; what a process
#: sends to another must not exhaust a stack.
MAX_DEPTH: Final = 64

#: Python writes infinities so, and NxD Inference's files have them.
_INFINITIES: Final = {"Infinity": math.inf, "-Infinity": -math.inf}


def parse_document(text: str, *, field: str = "config_json") -> Document:
    """Reads JSON text; `Infinity` and `-Infinity` are numbers, as in the files that NxD Inference writes.

    Raises ConfigInvalid for `field` if it is no JSON object, gives a name twice, has a NaN, or is nested too deeply.
    """
    try:
        document = json.loads(text, object_pairs_hook=_unique_names, parse_constant=_parse_constant)
    except (ValueError, RecursionError) as error:
        raise _invalid(field, show(text), f"a JSON object ({error})") from error
    if not isinstance(document, dict):
        raise _invalid(field, show(document), 'a JSON object such as {"neuron_config": {"seq_len": 256}}')
    if _is_deeper(document, MAX_DEPTH):
        raise _invalid(field, show(document), f"objects and lists inside each other at most {MAX_DEPTH} deep")
    return document


def _is_deeper(document: Document, depth: int) -> bool:
    level: list[dict[str, Any] | list[Any]] = [document]
    for _ in range(depth):
        inside = (item for one in level for item in (one.values() if isinstance(one, dict) else one))
        level = [item for item in inside if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def _unique_names(pairs: list[tuple[str, Any]]) -> Document:
    document = dict(pairs)
    if len(document) < len(pairs):
        # Counted in one pass: a document may hold tens of thousands of names.
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{show(name)} is given twice")
    return document


def _parse_constant(text: str) -> float:
    if text not in _INFINITIES:
        raise ValueError(f"{text} is no JSON number")
    return _INFINITIES[text]


def _invalid(field: str, value: str, accepted: str) -> ConfigInvalid:
    return ConfigInvalid([FieldViolation(field, value, accepted)])
