"""The configuration classes of the documents, and their attributes as tables: one row for each attribute."""

from __future__ import annotations

from inspect import get_annotations
from typing import Final

from compiler_svc.config.attribute import ConfigTable, read_attributes
from compiler_svc.config.tables.experts import (
    BlockwiseMatmulConfig,
    HybridShardingConfig,
    MoEFusedTKGConfig,
    MoENeuronConfig,
    RoutedExpertsMLPOpsConfig,
    RouterConfig,
)
from compiler_svc.config.tables.inference_config import FusedSpecNeuronConfig, InferenceConfig
from compiler_svc.config.tables.lora import LoraServingConfig
from compiler_svc.config.tables.model_attributes import MODEL_ATTRIBUTES
from compiler_svc.config.tables.neuron_config import NeuronConfig
from compiler_svc.config.tables.sampling import OnDeviceSamplingConfig
from compiler_svc.config.tables.unrecorded import UNRECORDED

__all__ = ["INFERENCE_CONFIG", "MODEL_ATTRIBUTES", "MOE_NAMES", "NEURON_CONFIG", "TABLES"]

#: By class name. NeuronConfig's table holds MoENeuronConfig's attributes, too.
TABLES: Final[dict[str, ConfigTable]] = {
    cls.__name__: ConfigTable(
        cls, read_attributes(MoENeuronConfig if cls is NeuronConfig else cls), UNRECORDED.get(cls.__name__, ())
    )
    for cls in (
        InferenceConfig,
        NeuronConfig,
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
INFERENCE_CONFIG: Final = TABLES["InferenceConfig"]
NEURON_CONFIG: Final = TABLES["NeuronConfig"]

#: Attributes of NeuronConfig's table that only MoENeuronConfig has.
MOE_NAMES: Final = frozenset(get_annotations(MoENeuronConfig))
