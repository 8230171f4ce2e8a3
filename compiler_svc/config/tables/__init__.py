"""The configuration classes of the documents as tables: one row for each attribute."""

from __future__ import annotations

from typing import Final

from compiler_svc.config.attribute import ConfigTable
from compiler_svc.config.tables.experts import (
    BLOCKWISE_MATMUL_CONFIG,
    HYBRID_SHARDING_CONFIG,
    MOE_ATTRIBUTES,
    MOE_FUSED_TKG_CONFIG,
    ROUTED_EXPERTS_MLP_OPS_CONFIG,
    ROUTER_CONFIG,
)
from compiler_svc.config.tables.inference import INFERENCE_CONFIG, NEURON_CONFIG
from compiler_svc.config.tables.lora import LORA_SERVING_CONFIG
from compiler_svc.config.tables.model_attributes import MODEL_ATTRIBUTES
from compiler_svc.config.tables.sampling import ON_DEVICE_SAMPLING_CONFIG
from compiler_svc.config.tables.speculation import FUSED_SPEC_NEURON_CONFIG

__all__ = [
    "INFERENCE_CONFIG",
    "MODEL_ATTRIBUTES",
    "MOE_NAMES",
    "NEURON_CONFIG",
    "ON_DEVICE_SAMPLING_CONFIG",
    "TABLES",
]

#: Attributes of NeuronConfig's table that only MoENeuronConfig has.
MOE_NAMES: Final = frozenset(attribute.name for attribute in MOE_ATTRIBUTES)

#: By class name. NeuronConfig's table holds MoENeuronConfig's attributes, too.
TABLES: Final[dict[str, ConfigTable]] = {
    table.class_name: table
    for table in (
        INFERENCE_CONFIG,
        NEURON_CONFIG,
        ON_DEVICE_SAMPLING_CONFIG,
        LORA_SERVING_CONFIG,
        FUSED_SPEC_NEURON_CONFIG,
        ROUTER_CONFIG,
        ROUTED_EXPERTS_MLP_OPS_CONFIG,
        BLOCKWISE_MATMUL_CONFIG,
        MOE_FUSED_TKG_CONFIG,
        HYBRID_SHARDING_CONFIG,
    )
}
