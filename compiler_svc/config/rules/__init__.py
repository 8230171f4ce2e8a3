"""Rules between attributes, and notes on combinations that may surprise a caller: one module for each subject.

Every demand of the documents is a `Rule` in a table. A rule that reads a mistaken attribute is left out.
"""

from collections.abc import Mapping
from typing import Final

from compiler_svc.config.rules.async_mode import ASYNC_MODE_RULES
from compiler_svc.config.rules.attention import ATTENTION_RULES
from compiler_svc.config.rules.batching import BATCHING_NOTES, BATCHING_RULES
from compiler_svc.config.rules.block_kv import BLOCK_KV_NOTES, BLOCK_KV_RULES
from compiler_svc.config.rules.buckets import BUCKET_NOTES, BUCKET_RULES
from compiler_svc.config.rules.draft import INFERENCE_CONFIG_RULES
from compiler_svc.config.rules.kernels import KERNEL_RULES
from compiler_svc.config.rules.lengths import LENGTH_NOTES, LENGTH_RULES
from compiler_svc.config.rules.lora import LORA_SERVING_NOTES, LORA_SERVING_RULES
from compiler_svc.config.rules.medusa import MEDUSA_NOTES, MEDUSA_RULES
from compiler_svc.config.rules.model import model_rules
from compiler_svc.config.rules.moe import (
    BLOCKWISE_MATMUL_NOTES,
    BLOCKWISE_MATMUL_RULES,
    MOE_NOTES,
    MOE_RULES,
    ROUTED_EXPERTS_RULES,
)
from compiler_svc.config.rules.quantization import QUANTIZATION_NOTES, QUANTIZATION_RULES
from compiler_svc.config.rules.rule import Note, Rule, broken_rules, find_value, notes_on
from compiler_svc.config.rules.sampling import ON_DEVICE_SAMPLING_NOTES, ON_DEVICE_SAMPLING_RULES, SAMPLING_NOTES
from compiler_svc.config.rules.speculation import SPECULATION_NOTES, SPECULATION_RULES
from compiler_svc.config.rules.targets import TARGET_RULES

#: Rules on the values of a NeuronConfig, its nested tables included.
NEURON_CONFIG_RULES: Final = (
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
    *ASYNC_MODE_RULES,
    *MOE_RULES,
)

NEURON_CONFIG_NOTES: Final = (
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
    "NeuronConfig": (NEURON_CONFIG_RULES, NEURON_CONFIG_NOTES),
    "OnDeviceSamplingConfig": (ON_DEVICE_SAMPLING_RULES, ON_DEVICE_SAMPLING_NOTES),
    "LoraServingConfig": (LORA_SERVING_RULES, LORA_SERVING_NOTES),
    "RoutedExpertsMLPOpsConfig": (ROUTED_EXPERTS_RULES, ()),
    "BlockwiseMatmulConfig": (BLOCKWISE_MATMUL_RULES, BLOCKWISE_MATMUL_NOTES),
}

__all__ = [
    "NEURON_CONFIG_NOTES",
    "NEURON_CONFIG_RULES",
    "ON_DEVICE_SAMPLING_NOTES",
    "ON_DEVICE_SAMPLING_RULES",
    "RULES",
    "Note",
    "Rule",
    "broken_rules",
    "find_value",
    "model_rules",
    "notes_on",
]
