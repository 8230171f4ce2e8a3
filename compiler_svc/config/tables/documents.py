"""The documents, and the sections that tables and messages refer to."""

from __future__ import annotations

from typing import Final

#: The newest API reference, which wins if documents differ.
API_GUIDE: Final = "NxD Inference API guide"
#: The next newest.
FEATURE_GUIDE: Final = "NxD Inference feature guide"
TRANSFORMERS_NEURONX_GUIDE: Final = "Transformers NeuronX guide"

GENERAL: Final = f"{API_GUIDE}, General configuration"
DISTRIBUTED: Final = f"{API_GUIDE}, Distributed configuration"
ATTENTION: Final = f"{API_GUIDE}, Attention"
SAMPLING: Final = f"{API_GUIDE}, On-device sampling"
BUCKETING: Final = f"{API_GUIDE}, Bucketing"
QUANTIZATION: Final = f"{API_GUIDE}, Quantization"
KV_QUANTIZATION: Final = f"{API_GUIDE}, KV cache quantization"
KERNELS: Final = f"{API_GUIDE}, Kernels"
CONTINUOUS_BATCHING: Final = f"{API_GUIDE}, Continuous batching"
SPECULATION: Final = f"{API_GUIDE}, Speculative decoding"
MEDUSA: Final = f"{API_GUIDE}, Medusa decoding"
LORA: Final = f"{API_GUIDE}, Multi-LoRA serving"
COMPILATION: Final = f"{API_GUIDE}, Compilation configuration"
DEBUGGING: Final = f"{API_GUIDE}, Debugging"
INFERENCE_CONFIG: Final = f"{API_GUIDE}, InferenceConfig"
FUSED_SPECULATION: Final = f"{API_GUIDE}, FusedSpecNeuronConfig"
MOE: Final = f"{API_GUIDE}, MoENeuronConfig"
ROUTER: Final = f"{API_GUIDE}, RouterConfig"
ROUTED_EXPERTS: Final = f"{API_GUIDE}, RoutedExpertsMLPOpsConfig"
BLOCKWISE_MATMUL: Final = f"{API_GUIDE}, BlockwiseMatmulConfig"
MOE_FUSED_TKG: Final = f"{API_GUIDE}, MoEFusedTKGConfig"
HYBRID_SHARDING: Final = f"{API_GUIDE}, HybridShardingConfig"

FEATURE_SAMPLING: Final = f"{FEATURE_GUIDE}, On-device sampling support"
PREFIX_CACHING: Final = f"{FEATURE_GUIDE}, Prefix caching support"
FEATURE_LORA: Final = f"{FEATURE_GUIDE}, Multi-LoRA serving"
FEATURE_FUSED_SPECULATION: Final = f"{FEATURE_GUIDE}, Fused speculation"
FEATURE_SPECULATION: Final = f"{FEATURE_GUIDE}, Speculative decoding"

#: The section of attributes that only NxD Inference's code or Kiln has.
UNDOCUMENTED: Final = ""
