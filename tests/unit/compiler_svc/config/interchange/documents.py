"""Random documents with values for every attribute of the tables; rules between attributes are not kept."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from compiler_svc.config.attribute import Attribute, ConfigTable
from compiler_svc.config.domains import ASCENDING_LENGTHS, CLASS, FLAG, LIMIT, PATHS, TEXT, TEXT_MAP, TEXTS, Domain
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


#: Values of a domain without limits and words, as a document has them.
_VALUES: dict[Domain, st.SearchStrategy[Any]] = {
    LIMIT: st.floats(-1e6, 1e6) | st.sampled_from([float("inf"), float("-inf"), "Infinity"]),
    FLAG: st.booleans(),
    ASCENDING_LENGTHS: st.sets(st.integers(1, 4096), max_size=4).map(sorted),
    TEXTS: st.lists(NAMES, max_size=3),
    TEXT_MAP: st.dictionaries(NAMES, NAMES, max_size=3),
    PATHS: st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), max_size=3),
    CLASS: NAMES | st.builds("{}.{}.{}".format, NAMES, NAMES, NAMES),
    TEXT: st.text(min_size=1, max_size=8) | st.just("module.Class"),
}
_PREFIXES = ("", "torch.", "BlockShardStrategy.")


def _draw_value(domain: Domain) -> st.SearchStrategy[Any]:
    if domain.words:
        return st.sampled_from([prefix + word for prefix in _PREFIXES for word in domain.words]).filter(domain.accepts)
    if domain.limits is None:
        return _VALUES[domain]
    smallest, largest = domain.limits
    if isinstance(smallest, int):
        return st.integers(smallest, min(int(largest), 4096))
    return st.floats(max(smallest, -1e6), min(largest, 1e6)).filter(domain.accepts) | st.just(1)


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
    if not domain.table:
        return _draw_value(domain)
    if domain.table != INFERENCE_CONFIG.class_name:
        table = TABLES[domain.table]
        return st.deferred(lambda: draw_table(table, nested=nested))
    # A draft model has no draft model of its own.
    neuron_config = draw_table(TABLES["NeuronConfig"], nested=False)
    return st.builds(lambda model, inner: model | {"neuron_config": inner}, MODEL_ATTRIBUTES, neuron_config)
