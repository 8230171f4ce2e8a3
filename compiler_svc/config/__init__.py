"""The configuration: NxD Inference's names in, frozen and fully resolved dataclasses out.

Knows names, defaults, ranges and rules, as tables. Must not know protobuf, torch, files or how an attribute is served.
"""

from compiler_svc.config.document import parse_document
from compiler_svc.config.neuron_config import DType, InferenceConfig, NeuronConfig, OnDeviceSamplingConfig
from compiler_svc.config.resolve import Resolution, resolve_config

__all__ = [
    "DType",
    "InferenceConfig",
    "NeuronConfig",
    "OnDeviceSamplingConfig",
    "Resolution",
    "parse_document",
    "resolve_config",
]
