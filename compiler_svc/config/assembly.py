"""Builds the frozen configuration classes from validated values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

from compiler_svc.config.attribute import Values
from compiler_svc.config.buckets import resolve_buckets
from compiler_svc.config.domains import Table
from compiler_svc.config.tables import INFERENCE_CONFIG, MOE_NAMES, TABLES
from compiler_svc.config.tables.experts import MoENeuronConfig
from compiler_svc.config.tables.inference_config import InferenceConfig

#: What is resolved only when all values of a table are known, by class name.
_RESOLVE_LAST: Final[Mapping[str, Callable[[Values], Mapping[str, Any]]]] = {
    "NeuronConfig": resolve_buckets,
    # NxD Inference spells "no limit" -1 as well as 0.
    "OnDeviceSamplingConfig": lambda values: {"top_k": max(values["top_k"], 0)},
}


def assemble_inference_config(values: Values) -> InferenceConfig:
    """Builds a configuration, and the draft model's inside of it.

    Args:
        values: Of InferenceConfig's table, tables inside as mappings, and `model_attributes`.
    """
    config: InferenceConfig = _assemble(INFERENCE_CONFIG.class_name, values)
    return config


def _assemble(class_name: str, values: Values) -> Any:
    """Builds the class of a table, and those of the tables inside, from the values that it has fields for."""
    table = TABLES[class_name]
    resolved = dict(values)
    if class_name in _RESOLVE_LAST:
        resolved |= _RESOLVE_LAST[class_name](values)
    for attribute in table.attributes:
        if isinstance(attribute.domain, Table) and values[attribute.name] is not None:
            resolved[attribute.name] = _assemble(attribute.domain.of, values[attribute.name])
    # A configuration that sets any attribute of experts is one of a mixture of experts.
    has_experts = class_name == "NeuronConfig" and values["given"] & MOE_NAMES
    cls = MoENeuronConfig if has_experts else table.cls
    return cls(**{field.name: resolved[field.name] for field in dataclasses.fields(cls)})
