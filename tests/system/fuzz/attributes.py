"""Configurations with one attribute at a boundary: every attribute of every table, and every attribute of models."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final

from compiler_svc.config.domains import ASCENDING_LENGTHS, LIMIT, Domain
from compiler_svc.config.tables import INFERENCE_CONFIG, TABLES, list_model_attributes

#: Configurations that plan, for an attribute to change: one for each target.
BASES: Final[dict[str, dict[str, Any]]] = {
    "cpu": {"neuron_config": {"seq_len": 64, "batch_size": 2, "torch_dtype": "float32", "tp_degree": 1}},
    "trn2": {"neuron_config": {"seq_len": 64, "batch_size": 2, "torch_dtype": "bfloat16", "tp_degree": 2}},
}
#: What attributes are tried with, and how many of these each attribute is tried with in a run.
DRAWN: Final = 12
VALUES: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, -1, 1, 2, 7, 2**31 - 1, 2**31, 2**63 - 1, 2**64, 10**400),
    *(0.5, -0.0, 1e308, float("nan"), float("inf"), "", "a", "\0", "float32", "../.."),
    *([], {}, [1], [2**31], [[1]], {"a": 1}),
    *([1] * 2000, {str(number): "a" for number in range(2000)}, "a" * 10_000),
)


def list_boundaries(domain: Domain) -> Iterator[Any]:
    """The limits of a domain, and what lies just beyond."""
    match domain.limits:
        case (int(smallest), largest):
            yield from (smallest - 1, smallest, smallest + 1, largest - 1, largest, largest + 1)
        case (smallest, largest):
            yield from (smallest, largest, smallest + 1e-9, largest * 2, -largest)
    if domain.words:
        yield from (*domain.words, domain.words[0].upper())
    elif domain is LIMIT:
        yield from ("Infinity", "-Infinity", "NaN")
    elif domain is ASCENDING_LENGTHS:
        yield from ([1, 2], [2, 1], list(range(1, 129)), list(range(1, 130)), [64], [2**27], [2**27 + 1])


def list_attributes() -> Iterator[tuple[tuple[str, ...], Domain | None]]:
    """Path and domain of every attribute; a configuration inside of another one is entered once."""
    for name in sorted(list_model_attributes()):
        yield (name,), None
    yield from _walk(INFERENCE_CONFIG.cls.__name__, (), frozenset())


def _walk(table: str, path: tuple[str, ...], entered: frozenset[str]) -> Iterator[tuple[tuple[str, ...], Domain]]:
    for attribute in TABLES[table].rows:
        for name in attribute.names:
            yield (*path, name), attribute.domain
        inner = attribute.domain.table
        if inner and inner not in entered:
            yield from _walk(inner, (*path, attribute.name), entered | {table})


def list_documents(target: str, choose: random.Random) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Each attribute's path and a configuration that has it at a boundary, or at one of the values that are drawn."""
    for path, domain in list_attributes():
        boundaries = () if domain is None else list_boundaries(domain)
        for value in (*choose.sample(VALUES, DRAWN), *boundaries):
            yield path, set_value(BASES[target], path, value)


def set_value(document: Any, path: tuple[str, ...], value: Any) -> Any:
    """A copy of a document with one value set, and objects on the way there made."""
    if not path:
        return value
    inner = document.get(path[0], {}) if isinstance(document, dict) else {}
    return {**(document if isinstance(document, dict) else {}), path[0]: set_value(inner, path[1:], value)}
