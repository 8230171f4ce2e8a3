"""What a name that a table does not have may have been meant to be."""

from __future__ import annotations

import difflib
from typing import Final

from compiler_svc.config.attribute import ConfigTable, is_table
from compiler_svc.config.domains import Table
from compiler_svc.config.tables import INFERENCE_CONFIG, MODEL_ATTRIBUTES, TABLES

#: What would be accepted where nothing comes to mind.
ANY_NAME: Final = "a name that the configuration has"

#: Longer names are nobody's slip, and searching for what resembles them takes long.
_LONGEST_NAME: Final = 64


def suggest_name(name: str, table: ConfigTable) -> str:
    """What would be accepted in place of `name` in a table, in words."""
    known = [*table.by_name]
    if table is INFERENCE_CONFIG:
        known += [*MODEL_ATTRIBUTES, "transformers_neuronx"]
    paths = _find_paths(name)
    similar = [] if len(name) > _LONGEST_NAME else difflib.get_close_matches(name, known, n=1)
    if similar and not paths:
        return f"did you mean {similar[0]!r}?"
    if paths:
        return f"{ANY_NAME}; did you mean {paths[0]}?"
    return f"{ANY_NAME}; the model's own attributes come from the checkpoint's config.json"


def _find_paths(name: str) -> list[str]:
    """Where an attribute of this name stands, outermost first: options often stand one level too high or too low."""
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
