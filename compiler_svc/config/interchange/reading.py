"""Brings NxD Inference's files to the form of a document; leaves documents that users write as they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Final

from compiler_svc.config.attribute import ConfigTable, is_same
from compiler_svc.config.domains import TEXT_MAP, show
from compiler_svc.config.findings import Findings
from compiler_svc.config.interchange.saved_form import (
    DERIVED,
    DERIVED_OUTSIDE,
    FLAT_NAMES,
    is_saved,
    read_plain,
)
from compiler_svc.config.tables import INFERENCE_CONFIG, NEURON_CONFIG, TABLES, list_model_attributes
from compiler_svc.config.transformers_neuronx import SECTION as TRANSFORMERS_NEURONX

_SECTIONS: Final = frozenset({TRANSFORMERS_NEURONX}).union(*(row.names for row in INFERENCE_CONFIG.rows))
_MAX_SHOWN: Final = 16
_LORA_PATHS: Final = ("lora_ckpt_paths", "lora_ckpt_paths_cpu")


def adapt_document(document: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """Brings a document, and the draft model's inside of it, to the names and types that the tables have.

    Aliases of model attributes become their names; lists of adapters become objects, classes text. What NxD Inference
    saves but derives again is dropped. So are, with a note, attributes of models that no model here has, and names that
    another release of NxD Inference saved; in documents that it did not save they stay for validation to refuse.
    """
    return _adapt(document, "", findings, saved=is_saved(document))


def _adapt(document: Mapping[str, Any], path: str, findings: Findings, *, saved: bool) -> dict[str, Any]:
    adapted = _resolve_aliases(document, path, findings)
    if adapted.pop("metadata", None) is not None:
        findings.warnings.append(f"{path}metadata: it is for NxD Inference only, and kept nowhere")
    if saved:
        _drop_foreign_names(adapted, path, findings)
    neuron_config = adapted.get("neuron_config")
    if isinstance(neuron_config, Mapping):
        adapted["neuron_config"] = _adapt_neuron_config(neuron_config, f"{path}neuron_config.", findings, saved=saved)
    fused = adapted.get("fused_spec_config")
    if isinstance(fused, Mapping):
        fused = {name: read_plain(name, value) for name, value in fused.items()}
        if isinstance(fused.get("draft_config"), Mapping) and not path:
            draft_path = f"{path}fused_spec_config.draft_config."
            fused["draft_config"] = _adapt(fused["draft_config"], draft_path, findings, saved=saved)
        if saved:
            fused = _drop_unknown_names(fused, TABLES["FusedSpecNeuronConfig"], f"{path}fused_spec_config", findings)
        adapted["fused_spec_config"] = fused
    return adapted


def _resolve_aliases(document: Mapping[str, Any], path: str, findings: Findings) -> dict[str, Any]:
    """Sets the original attribute of every alias that the document's `attribute_map` has."""
    aliases = document.get("attribute_map")
    if not isinstance(aliases, Mapping) or not TEXT_MAP.accepts(aliases):
        return dict(document)
    for alias, original in aliases.items():
        if alias in _SECTIONS or original in _SECTIONS:
            findings.add_mistake(f"{path}attribute_map", {alias: original}, "names of model attributes")
    resolved = {name: value for name, value in document.items() if name not in aliases or name in _SECTIONS}
    for alias in sorted(document.keys() & aliases.keys() - _SECTIONS):
        original, value = aliases[alias], document[alias]
        if original in resolved and resolved[original] != value:
            accepted = f"{show(resolved[original])}, which {original} says: attribute_map makes them one"
            findings.add_mistake(f"{path}{alias}", value, accepted)
        resolved[original] = value
    return resolved


def _drop_foreign_names(adapted: dict[str, Any], path: str, findings: Findings) -> None:
    for name in DERIVED_OUTSIDE & adapted.keys():
        del adapted[name]
    foreign = sorted(adapted.keys() - list_model_attributes() - _SECTIONS)
    for name in foreign:
        del adapted[name]
    if foreign:
        place = path.removesuffix(".") or "config"
        shown = _list_names(map(show, foreign))
        findings.warnings.append(f"{place}: ignored, because no model here has attributes of these names: {shown}")


def _drop_unknown_names(values: Mapping[str, Any], table: ConfigTable, path: str, findings: Findings) -> dict[str, Any]:
    """What a saved table says under names that the table has here, the tables inside likewise; a note has the rest."""
    unknown = sorted(values.keys() - table.by_name.keys())
    if unknown:
        shown = _list_names(f"{show(name)} = {show(values[name])}" for name in unknown)
        findings.warnings.append(
            f"{path}: ignored, because the releases of NxD Inference that are known here have no such names: {shown}"
        )
    known = {name: value for name, value in values.items() if name in table.by_name}
    for name, value in known.items():
        domain = table.find(name).domain
        # The draft model's configuration is a document of its own.
        if domain.table and isinstance(value, Mapping) and domain.table != INFERENCE_CONFIG.class_name:
            known[name] = _drop_unknown_names(value, TABLES[domain.table], f"{path}.{name}", findings)
    return known


def _list_names(names: Iterable[str]) -> str:
    first = [*islice(names, _MAX_SHOWN + 1)]
    return ", ".join(first[:_MAX_SHOWN]) + (", …" if len(first) > _MAX_SHOWN else "")


def _adapt_neuron_config(
    neuron_config: Mapping[str, Any], path: str, findings: Findings, *, saved: bool
) -> dict[str, Any]:
    dropped = DERIVED if saved else frozenset()
    adapted = {name: value for name, value in neuron_config.items() if name not in dropped}
    if isinstance(blockwise := adapted.get("blockwise_matmul_config"), Mapping):
        adapted["blockwise_matmul_config"] = {name: read_plain(name, value) for name, value in blockwise.items()}
    if isinstance(lora := adapted.get("lora_config"), Mapping):
        adapted["lora_config"] = {
            name: _read_adapters(value) if name in _LORA_PATHS else value for name, value in lora.items()
        }
    for table, names in FLAT_NAMES.items():
        _join_flat_names(adapted, table, names, path, findings)
    if saved:
        adapted = _drop_unknown_names(adapted, NEURON_CONFIG, path.removesuffix("."), findings)
    return adapted


def _read_adapters(value: Any) -> Any:
    """Adapters as an object if they are a list of `id: path`; other values stay for validation to refuse."""
    if not isinstance(value, list) or not all(isinstance(one, str) and ":" in one for one in value):
        return value
    pairs = [one.split(":", 1) for one in value]
    adapters = {name.strip(): checkpoint.strip() for name, checkpoint in pairs}
    # A name that is given twice has to stay visible.
    return adapters if len(adapters) == len(value) else value


def _join_flat_names(
    adapted: dict[str, Any], table: str, names: Mapping[str, str], path: str, findings: Findings
) -> None:
    """Moves what NeuronConfig says under keywords of its own into the configuration that documents have for it."""
    given = {name: value for name in names if (value := adapted.pop(name, None)) is not None}
    if not given:
        return
    nested = adapted.get(table)
    joined = dict(nested) if isinstance(nested, Mapping) else {}
    for name, value in given.items():
        inside = joined.get(names[name])
        if inside is not None and not is_same(inside, value):
            findings.add_mistake(f"{path}{name}", value, f"{show(inside)}, which {table}.{names[name]} says")
        joined[names[name]] = value
    if nested is None or isinstance(nested, Mapping):
        adapted[table] = joined
