"""Which LoRA adapters are served, and how their weights are kept."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LoraServingConfig:
    """Which LoRA adapters are served. See `kiln.config.v1.LoraServingConfig` for each attribute.

    `lora_ckpt_paths` and `lora_ckpt_paths_cpu` map adapter ids to checkpoint paths.
    """

    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int
    enable_dynamic_multi_lora: bool
    lora_ckpt_paths: dict[str, str]
    lora_ckpt_paths_cpu: dict[str, str]
    lora_ckpt_json: str | None
    lora_memory_transpose: bool
    lora_shard_linear_layer: bool
    base_model_quantized: bool
    target_modules: tuple[str, ...]
