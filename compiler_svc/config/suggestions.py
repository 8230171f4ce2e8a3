"""Suggests a name in place of one that a table does not have."""

from __future__ import annotations

import difflib
from typing import Final

from compiler_svc.config.attribute import ConfigTable, is_table
from compiler_svc.config.domains import Table
from compiler_svc.config.tables import INFERENCE_CONFIG, MODEL_ATTRIBUTES, TABLES

#: What is accepted, if no name resembles the given one.
ANY_NAME: Final = "a name that the configuration has"

#: Characters of a name that is searched for: longer ones are no misspellings, and the search takes long.
_MAX_NAME_CHARS: Final = 64


def suggest_name(name: str, table: ConfigTable) -> str:
    """Says in words what a table accepts in place of `name`."""
    known = [*table.by_name]
    if table is INFERENCE_CONFIG:
        known += [*MODEL_ATTRIBUTES, "transformers_neuronx"]
    paths = _find_paths(name)
    similar = [] if len(name) > _MAX_NAME_CHARS else difflib.get_close_matches(name, known, n=1)
    if similar and not paths:
        return f"did you mean {similar[0]!r}?"
    if paths:
        return f"{ANY_NAME}; did you mean {paths[0]}?"
    return f"{ANY_NAME}; the model's own attributes come from the checkpoint's config.json"


def _find_paths(name: str) -> list[str]:
    """Finds attributes with this name, outermost first: callers often give one a level too high or too low."""
    found, queue, seen = [], [("", INFERENCE_CONFIG)], set()
    while queue:
        path, table = queue.pop(0)
        if table.class_name in seen:
            continue
        seen.add(table.class_name)
        if name in table.by_name:
            found.append(f"{path}{name}")
        queue += [
            (f"{path}{attribute.name}.", TABLES[attribute.domain.of])
            for attribute in table.attributes
            if is_table(attribute) and isinstance(attribute.domain, Table)
        ]
    if name in MODEL_ATTRIBUTES:
        found.append(f"{name} at the top level")
    return found
