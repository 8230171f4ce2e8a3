"""The configuration: NxD Inference's names in, frozen and fully resolved dataclasses out.

Knows names, defaults, ranges and rules, as tables. Must not know protobuf, torch, files or how an attribute is served.
"""

from bundle.manifest import TargetKind
from compiler_svc.config.attribute import TARGET_KINDS
from compiler_svc.config.document import parse_document
from compiler_svc.config.findings import Hint
from compiler_svc.config.resolve import Resolution, read_config, resolve_config
from compiler_svc.config.tables.experts import (
    BlockwiseMatmulConfig,
    HybridShardingConfig,
    MoEFusedTKGConfig,
    MoENeuronConfig,
    RoutedExpertsMLPOpsConfig,
    RouterConfig,
)
from compiler_svc.config.tables.general import DType
from compiler_svc.config.tables.inference_config import FusedSpecNeuronConfig, InferenceConfig
from compiler_svc.config.tables.lora import LoraServingConfig
from compiler_svc.config.tables.neuron_config import NeuronConfig
from compiler_svc.config.tables.sampling import OnDeviceSamplingConfig

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
    "read_config",
    "resolve_config",
]
