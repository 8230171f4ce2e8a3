"""Random documents with values for every attribute of the tables; rules between attributes are not kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from compiler_svc.config.attribute import Attribute, ConfigTable
from compiler_svc.config.domains import (
    AscendingLengths,
    Choice,
    ClassPath,
    Flag,
    Integer,
    Limit,
    Number,
    Paths,
    Table,
    Text,
    TextList,
    TextMap,
)
from compiler_svc.config.tables import INFERENCE_CONFIG, TABLES

NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,7}", fullmatch=True)
#: A few values of every type.
MODEL_ATTRIBUTES = st.fixed_dictionaries(
    {},
    optional={
        "hidden_size": st.integers(1, 4096),
        "rope_theta": st.floats(1, 1e9) | st.none(),
        "rope_scaling": st.none() | st.fixed_dictionaries({"rope_type": NAMES, "factor": st.floats(1, 8)}),
        "architectures": st.lists(NAMES, max_size=2),
        "tie_word_embeddings": st.booleans(),
        "dtype": st.sampled_from(["float32", "bfloat16"]),
    },
)


def _draw_numbers(domain: Number) -> st.SearchStrategy[float]:
    return st.floats(max(domain.smallest, -1e6), min(domain.largest, 1e6), exclude_min=domain.positive) | st.just(1)


#: Values of a domain, as a document has them, by its class.
_VALUES: dict[type[Any], Callable[[Any], st.SearchStrategy[Any]]] = {
    Integer: lambda domain: st.integers(domain.smallest, min(domain.largest, 4096)),
    Number: _draw_numbers,
    Limit: lambda _: st.floats(-1e6, 1e6) | st.sampled_from([float("inf"), float("-inf"), "Infinity"]),
    Flag: lambda _: st.booleans(),
    Choice: lambda domain: st.sampled_from([*domain.words, *(domain.prefix + word for word in domain.words)]),
    AscendingLengths: lambda _: st.sets(st.integers(1, 4096), max_size=4).map(sorted),
    TextList: lambda _: st.lists(NAMES, max_size=3),
    TextMap: lambda _: st.dictionaries(NAMES, NAMES, max_size=3),
    Paths: lambda _: st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), max_size=3),
    ClassPath: lambda _: NAMES | st.builds("{}.{}.{}".format, NAMES, NAMES, NAMES),
    Text: lambda _: st.text(min_size=1, max_size=8) | st.just("module.Class"),
}


def draw_table(table: ConfigTable, *, nested: bool = True) -> st.SearchStrategy[dict[str, Any]]:
    """Objects of a table, each attribute unset, null or of any value."""
    attributes = [row for row in table.attributes if row.name != "attribute_map" and not row.deprecated]
    values = {row.name: st.none() | _draw_attribute(row, nested=nested) for row in attributes}
    return st.fixed_dictionaries({}, optional=values)


def draw_document() -> st.SearchStrategy[dict[str, Any]]:
    """Whole documents, draft models included."""
    return st.builds(lambda model, sections: model | sections, MODEL_ATTRIBUTES, draw_table(INFERENCE_CONFIG))


def _draw_attribute(row: Attribute, *, nested: bool) -> st.SearchStrategy[Any]:
    domain = row.domain
    if not isinstance(domain, Table):
        return _VALUES[type(domain)](domain)
    if domain.of != INFERENCE_CONFIG.class_name:
        table = TABLES[domain.of]
        return st.deferred(lambda: draw_table(table, nested=nested))
    # A draft model has no draft model of its own.
    neuron_config = draw_table(TABLES["NeuronConfig"], nested=False)
    return st.builds(lambda model, inner: model | {"neuron_config": inner}, MODEL_ATTRIBUTES, neuron_config)
