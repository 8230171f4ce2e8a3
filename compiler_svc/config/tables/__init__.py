"""The configuration classes of the documents, one module for each subject.

An attribute is a row of a table. Behind the rows of a subject stand its rules, demands that attributes make of each
other, and its notes on combinations that may surprise a caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import get_annotations
from typing import Final

from compiler_svc.config.attribute import ConfigTable, read_attributes
from compiler_svc.config.rule import Note, Rule
from compiler_svc.config.tables.attention import ATTENTION_RULES, BLOCK_KV_NOTES, BLOCK_KV_RULES, KERNEL_RULES
from compiler_svc.config.tables.batching import BATCHING_NOTES, BATCHING_RULES, BUCKET_NOTES, BUCKET_RULES
from compiler_svc.config.tables.experts import (
    BLOCKWISE_MATMUL_NOTES,
    BLOCKWISE_MATMUL_RULES,
    MOE_NOTES,
    MOE_RULES,
    ROUTED_EXPERTS_RULES,
    BlockwiseMatmulConfig,
    HybridShardingConfig,
    MoEFusedTKGConfig,
    MoENeuronConfig,
    RoutedExpertsMLPOpsConfig,
    RouterConfig,
)
from compiler_svc.config.tables.general import LENGTH_NOTES, LENGTH_RULES, TARGET_RULES
from compiler_svc.config.tables.inference_config import (
    INFERENCE_CONFIG_RULES,
    FusedSpecNeuronConfig,
    InferenceConfig,
)
from compiler_svc.config.tables.lora import LORA_SERVING_NOTES, LORA_SERVING_RULES, LoraServingConfig
from compiler_svc.config.tables.model_attributes import list_model_attributes
from compiler_svc.config.tables.neuron_config import NeuronConfig
from compiler_svc.config.tables.quantization import (
    KV_QUANTIZATION_RULES,
    QUANTIZATION_NOTES,
    QUANTIZATION_RULES,
    KVQuantizationConfig,
)
from compiler_svc.config.tables.sampling import (
    ON_DEVICE_SAMPLING_NOTES,
    ON_DEVICE_SAMPLING_RULES,
    SAMPLING_NOTES,
    SAMPLING_RULES,
    OnDeviceSamplingConfig,
)
from compiler_svc.config.tables.speculation import (
    ASYNC_MODE_RULES,
    MEDUSA_NOTES,
    MEDUSA_RULES,
    SPECULATION_NOTES,
    SPECULATION_RULES,
)
from compiler_svc.config.tables.unrecorded import UNRECORDED

__all__ = ["INFERENCE_CONFIG", "MOE_NAMES", "NEURON_CONFIG", "RULES", "TABLES", "list_model_attributes"]
#: Rules on the values of a NeuronConfig, its nested tables included, in the order in which errors list them.
_NEURON_CONFIG_RULES: Final = (
    *LENGTH_RULES,
    *BATCHING_RULES,
    *TARGET_RULES,
    *ATTENTION_RULES,
    *BUCKET_RULES,
    *BLOCK_KV_RULES,
    *QUANTIZATION_RULES,
    *KERNEL_RULES,
    *SPECULATION_RULES,
    *MEDUSA_RULES,
    *SAMPLING_RULES,
    *ASYNC_MODE_RULES,
    *MOE_RULES,
)

_NEURON_CONFIG_NOTES: Final = (
    *BUCKET_NOTES,
    *LENGTH_NOTES,
    *BATCHING_NOTES,
    *SAMPLING_NOTES,
    *BLOCK_KV_NOTES,
    *QUANTIZATION_NOTES,
    *SPECULATION_NOTES,
    *MEDUSA_NOTES,
    *MOE_NOTES,
)

#: Rules and notes by the class of the table whose values they read.
RULES: Final[Mapping[str, tuple[tuple[Rule, ...], tuple[Note, ...]]]] = {
    "InferenceConfig": (INFERENCE_CONFIG_RULES, ()),
    "NeuronConfig": (_NEURON_CONFIG_RULES, _NEURON_CONFIG_NOTES),
    "OnDeviceSamplingConfig": (ON_DEVICE_SAMPLING_RULES, ON_DEVICE_SAMPLING_NOTES),
    "KVQuantizationConfig": (KV_QUANTIZATION_RULES, ()),
    "LoraServingConfig": (LORA_SERVING_RULES, LORA_SERVING_NOTES),
    "RoutedExpertsMLPOpsConfig": (ROUTED_EXPERTS_RULES, ()),
    "BlockwiseMatmulConfig": (BLOCKWISE_MATMUL_RULES, BLOCKWISE_MATMUL_NOTES),
}

#: By class name. NeuronConfig's table holds MoENeuronConfig's attributes, too.
TABLES: Final[dict[str, ConfigTable]] = {
    cls.__name__: ConfigTable(
        cls, read_attributes(MoENeuronConfig if cls is NeuronConfig else cls), UNRECORDED.get(cls.__name__, ())
    )
    for cls in (
        InferenceConfig,
        NeuronConfig,
        OnDeviceSamplingConfig,
        KVQuantizationConfig,
        LoraServingConfig,
        FusedSpecNeuronConfig,
        RouterConfig,
        RoutedExpertsMLPOpsConfig,
        BlockwiseMatmulConfig,
        MoEFusedTKGConfig,
        HybridShardingConfig,
    )
}
INFERENCE_CONFIG: Final = TABLES["InferenceConfig"]
NEURON_CONFIG: Final = TABLES["NeuronConfig"]

#: Attributes of NeuronConfig's table that only MoENeuronConfig has.
MOE_NAMES: Final = frozenset(get_annotations(MoENeuronConfig))
