"""The configuration: NxD Inference's names in, frozen and fully resolved dataclasses out.

Knows names, defaults, ranges and rules, as tables. Must not know protobuf, torch, files or how an attribute is served.
"""

from compiler_svc.config.attribute import TARGET_KINDS, TargetKind
from compiler_svc.config.document import parse_document
from compiler_svc.config.findings import Hint
from compiler_svc.config.resolve import Resolution, resolve_config
from compiler_svc.config.tables import (
    BlockwiseMatmulConfig,
    DType,
    FusedSpecNeuronConfig,
    HybridShardingConfig,
    InferenceConfig,
    LoraServingConfig,
    MoEFusedTKGConfig,
    MoENeuronConfig,
    NeuronConfig,
    OnDeviceSamplingConfig,
    RoutedExpertsMLPOpsConfig,
    RouterConfig,
)

__all__ = [
    "TARGET_KINDS",
    "BlockwiseMatmulConfig",
    "DType",
    "FusedSpecNeuronConfig",
    "Hint",
    "HybridShardingConfig",
    "InferenceConfig",
    "LoraServingConfig",
    "MoEFusedTKGConfig",
    "MoENeuronConfig",
    "NeuronConfig",
    "OnDeviceSamplingConfig",
    "Resolution",
    "RoutedExpertsMLPOpsConfig",
    "RouterConfig",
    "TargetKind",
    "parse_document",
    "resolve_config",
]
