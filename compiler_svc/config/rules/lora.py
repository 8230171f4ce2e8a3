"""Rules on the values of a LoraServingConfig."""

from __future__ import annotations

from typing import Final

from compiler_svc.config.rules.rule import Note, Rule
from compiler_svc.config.tables.documents import FEATURE_LORA, LORA

LORA_SERVING_RULES: Final = (
    Rule(
        ("lora_ckpt_json", "lora_ckpt_paths", "lora_ckpt_paths_cpu"),
        lambda v: not (v["lora_ckpt_json"] and (v["lora_ckpt_paths"] or v["lora_ckpt_paths_cpu"])),
        "nothing, because adapters are listed in lora_ckpt_paths or lora_ckpt_paths_cpu: one or the other",
        LORA,
    ),
    Rule(
        ("lora_ckpt_paths", "max_loras"),
        lambda v: len(v["lora_ckpt_paths"] or ()) <= v["max_loras"],
        "at most max_loras adapters, which is {max_loras}",
        FEATURE_LORA,
    ),
    Rule(
        ("lora_ckpt_paths_cpu", "max_cpu_loras"),
        lambda v: len(v["lora_ckpt_paths_cpu"] or ()) <= v["max_cpu_loras"],
        "at most max_cpu_loras adapters, which is {max_cpu_loras}",
        LORA,
    ),
    Rule(
        ("enable_dynamic_multi_lora", "lora_ckpt_paths_cpu", "lora_ckpt_json"),
        lambda v: not v["enable_dynamic_multi_lora"] or bool(v["lora_ckpt_paths_cpu"] or v["lora_ckpt_json"]),
        "false, unless lora_ckpt_paths_cpu or lora_ckpt_json lists the adapters in host memory that can be loaded",
        LORA,
    ),
)

LORA_SERVING_NOTES: Final = (
    Note(
        lambda v: v["base_model_quantized"] != v["outer"]["quantized"],
        "neuron_config.lora_config.base_model_quantized: it is {base_model_quantized}, but quantized, which counts, is "
        "{outer[quantized]}",
    ),
    Note(
        lambda v: bool(v["lora_ckpt_paths_cpu"]) and not v["enable_dynamic_multi_lora"],
        "neuron_config.lora_config.lora_ckpt_paths_cpu: adapters in host memory are never loaded because "
        "enable_dynamic_multi_lora is false",
    ),
)
