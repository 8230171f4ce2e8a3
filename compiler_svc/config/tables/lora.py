"""LoraServingConfig."""

from __future__ import annotations

from typing import Final

from compiler_svc.config.attribute import LATER, Alias, Attribute, ConfigTable
from compiler_svc.config.domains import Flag, Integer, Text, TextList, TextMap
from compiler_svc.config.tables.documents import FEATURE_LORA, LORA, UNDOCUMENTED
from compiler_svc.config.tables.undocumented import only_default

LORA_SERVING_CONFIG: Final = ConfigTable(
    "LoraServingConfig",
    (
        Attribute(name="max_loras", domain=Integer(1), default=1, section=LORA, cpu=LATER),
        Attribute(name="max_lora_rank", domain=Integer(1), default=16, section=FEATURE_LORA, cpu=LATER),
        Attribute(name="max_cpu_loras", domain=Integer(1), default=100, section=LORA, cpu=LATER),
        Attribute(
            name="enable_dynamic_multi_lora",
            domain=Flag(),
            default=False,
            section=LORA,
            cpu=LATER,
            aliases=(Alias("enable-dynamic-multi-lora"), Alias("dynamic_multi_lora")),
        ),
        Attribute(name="lora_ckpt_paths", domain=TextMap(), default={}, section=LORA, cpu=LATER),
        Attribute(name="lora_ckpt_paths_cpu", domain=TextMap(), default={}, section=LORA, cpu=LATER),
        Attribute(name="lora_ckpt_json", domain=Text(), section=LORA, cpu=LATER),
        Attribute(name="lora_memory_transpose", domain=Flag(), default=True, section=LORA, cpu=LATER),
        Attribute(name="lora_shard_linear_layer", domain=Flag(), default=True, section=LORA, cpu=LATER),
        Attribute(name="base_model_quantized", domain=Flag(), default=False, section=LORA, cpu=LATER),
        Attribute(name="target_modules", domain=TextList(), default=(), section=UNDOCUMENTED, cpu=LATER),
    ),
    only_default(
        batch_size=1,
        lora_bias="none",
        eviction_policy="lru",
        lfu_decay_period=128,
        is_context_encoding=False,
        enable_base_model_only=False,
    ),
)
