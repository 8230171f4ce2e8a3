"""LoraServingConfig, and the attribute of NeuronConfig that holds it."""

from __future__ import annotations

from dataclasses import dataclass

from compiler_svc.config.attribute import LATER, Alias, attribute
from compiler_svc.config.domains import Integer
from compiler_svc.config.tables.documents import FEATURE_LORA, LORA, UNDOCUMENTED
from compiler_svc.config.tables.general import NO_SIZE


@dataclass(frozen=True, kw_only=True)
class LoraServingConfig:
    """Which LoRA adapters are served, and how their weights are kept. See `kiln.config.v1.LoraServingConfig`.

    `lora_ckpt_paths` and `lora_ckpt_paths_cpu` map adapter ids to checkpoint paths.
    """

    max_loras: int = attribute(LORA, Integer(1), default=1, cpu=LATER)
    max_lora_rank: int = attribute(FEATURE_LORA, Integer(1), default=16, cpu=LATER)
    max_cpu_loras: int = attribute(LORA, Integer(1), default=100, cpu=LATER, neuron=NO_SIZE)
    enable_dynamic_multi_lora: bool = attribute(
        LORA,
        default=False,
        cpu=LATER,
        aliases=(Alias("enable-dynamic-multi-lora"), Alias("dynamic_multi_lora")),
        neuron=NO_SIZE,
    )
    lora_ckpt_paths: dict[str, str] = attribute(LORA, default={}, cpu=LATER)
    lora_ckpt_paths_cpu: dict[str, str] = attribute(LORA, default={}, cpu=LATER)
    lora_ckpt_json: str | None = attribute(LORA, cpu=LATER)
    lora_memory_transpose: bool = attribute(LORA, default=True, cpu=LATER, neuron=NO_SIZE)
    lora_shard_linear_layer: bool = attribute(LORA, default=True, cpu=LATER)
    base_model_quantized: bool = attribute(LORA, default=False, cpu=LATER, neuron=NO_SIZE)
    target_modules: tuple[str, ...] = attribute(UNDOCUMENTED, default=(), cpu=LATER)


@dataclass(frozen=True, kw_only=True)
class LoraAttributes:
    """LoRA adapters; None compiles the model alone."""

    lora_config: LoraServingConfig | None = attribute(LORA, cpu=LATER)
