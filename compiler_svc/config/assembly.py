"""Judged values to the frozen configuration classes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from compiler_svc.config.attribute import Values
from compiler_svc.config.buckets import resolve_buckets
from compiler_svc.config.inference_config import FusedSpecNeuronConfig, InferenceConfig
from compiler_svc.config.lora_serving_config import LoraServingConfig
from compiler_svc.config.moe_neuron_config import (
    BlockwiseMatmulConfig,
    HybridShardingConfig,
    MoEFusedTKGConfig,
    MoENeuronConfig,
    RoutedExpertsMLPOpsConfig,
    RouterConfig,
)
from compiler_svc.config.neuron_config import NeuronConfig
from compiler_svc.config.on_device_sampling_config import OnDeviceSamplingConfig
from compiler_svc.config.tables import MOE_NAMES

_Class = TypeVar("_Class")

#: By class name of a table.
CLASSES: Final[Mapping[str, type[Any]]] = {
    cls.__name__: cls
    for cls in (
        InferenceConfig,
        NeuronConfig,
        MoENeuronConfig,
        OnDeviceSamplingConfig,
        LoraServingConfig,
        FusedSpecNeuronConfig,
        RouterConfig,
        RoutedExpertsMLPOpsConfig,
        BlockwiseMatmulConfig,
        MoEFusedTKGConfig,
        HybridShardingConfig,
    )
}


def assemble_inference_config(values: Values) -> InferenceConfig:
    """Builds a configuration, and the draft model's inside of it.

    Args:
        values: Of InferenceConfig's table, tables inside as mappings, and `model_attributes`.
    """
    fused = values["fused_spec_config"]
    return InferenceConfig(
        neuron_config=_assemble_neuron_config(values["neuron_config"]),
        fused_spec_config=None if fused is None else _assemble_fused_spec_config(fused),
        model_attributes=values["model_attributes"],
        attribute_map=values["attribute_map"],
    )


def _assemble_fused_spec_config(values: Values) -> FusedSpecNeuronConfig:
    draft = values["draft_config"]
    resolved = {"draft_config": None if draft is None else assemble_inference_config(draft)}
    return _assemble(FusedSpecNeuronConfig, {**values, **resolved})


def _assemble_neuron_config(values: Values) -> NeuronConfig:
    """A MoENeuronConfig where any of its own attributes is set."""
    cls = MoENeuronConfig if values["given"] & MOE_NAMES else NeuronConfig
    return _assemble(cls, {**values, **resolve_buckets(values)})


def _assemble_sampling_config(values: Values) -> OnDeviceSamplingConfig:
    # NxD Inference spells "no limit" -1 as well as 0.
    return _assemble(OnDeviceSamplingConfig, {**values, "top_k": max(values["top_k"], 0)})


def _assemble(cls: type[_Class], values: Values) -> _Class:
    """Builds one class from the values that it has attributes for."""
    fields = {field.name: values[field.name] for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name, value in fields.items():
        if name in _INSIDE and isinstance(value, Mapping):
            fields[name] = _INSIDE[name](value)
    return cls(**fields)


#: Builds the tables inside a NeuronConfig, by attribute.
_INSIDE: Final[Mapping[str, Callable[[Values], Any]]] = {
    "on_device_sampling_config": _assemble_sampling_config,
    **{
        name: functools.partial(_assemble, cls)
        for name, cls in {
            "lora_config": LoraServingConfig,
            "router_config": RouterConfig,
            "routed_experts_mlp_ops_config": RoutedExpertsMLPOpsConfig,
            "blockwise_matmul_config": BlockwiseMatmulConfig,
            "moe_fused_tkg_config": MoEFusedTKGConfig,
            "hybrid_sharding_config": HybridShardingConfig,
        }.items()
    },
}
