"""LoraServingConfig, and the attribute of NeuronConfig that holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from compiler_svc.config.attribute import LATER, Alias, attribute
from compiler_svc.config.domains import integer
from compiler_svc.config.rule import Note, Rule
from compiler_svc.config.tables.documents import FEATURE_LORA, LORA, UNDOCUMENTED
from compiler_svc.config.tables.general import NO_SIZE


@dataclass(frozen=True, kw_only=True)
class LoraServingConfig:
    """Which LoRA adapters are served, and how their weights are kept. See `kiln.config.v1.LoraServingConfig`.

    `lora_ckpt_paths` and `lora_ckpt_paths_cpu` map adapter ids to checkpoint paths.
    """

    max_loras: int = attribute(LORA, integer(1), default=1, cpu=LATER)
    max_lora_rank: int = attribute(
        FEATURE_LORA, integer(1), default=16, cpu=LATER, note="plans raise it to the ranks of the adapters' files"
    )
    max_cpu_loras: int = attribute(LORA, integer(1), default=100, cpu=LATER, neuron=NO_SIZE)
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


LORA_SERVING_RULES: Final = (
    Rule(
        ("lora_ckpt_json", "lora_ckpt_paths", "lora_ckpt_paths_cpu"),
        lambda v: not (v["lora_ckpt_json"] and (v["lora_ckpt_paths"] or v["lora_ckpt_paths_cpu"])),
        "nothing, because adapters are listed in lora_ckpt_paths or lora_ckpt_paths_cpu: one or the other",
        LORA,
        breaks={"lora_ckpt_json": "adapters.json", "lora_ckpt_paths": {"one": "one"}},
        keeps={"lora_ckpt_json": "adapters.json"},
    ),
    Rule(
        ("lora_ckpt_paths", "max_loras"),
        lambda v: len(v["lora_ckpt_paths"] or ()) <= v["max_loras"],
        "at most max_loras adapters, which is {max_loras}",
        FEATURE_LORA,
        breaks={"max_loras": 1, "lora_ckpt_paths": {"one": "one", "two": "two"}},
        keeps={"max_loras": 2, "lora_ckpt_paths": {"one": "one", "two": "two"}},
    ),
    Rule(
        ("lora_ckpt_paths_cpu", "max_cpu_loras"),
        lambda v: len(v["lora_ckpt_paths_cpu"] or ()) <= v["max_cpu_loras"],
        "at most max_cpu_loras adapters, which is {max_cpu_loras}",
        LORA,
        breaks={
            "enable_dynamic_multi_lora": True,
            "max_cpu_loras": 1,
            "lora_ckpt_paths_cpu": {"one": "one", "two": "two"},
        },
        keeps={
            "enable_dynamic_multi_lora": True,
            "max_cpu_loras": 2,
            "lora_ckpt_paths_cpu": {"one": "one", "two": "two"},
        },
    ),
    Rule(
        ("enable_dynamic_multi_lora", "lora_ckpt_paths_cpu", "lora_ckpt_json"),
        lambda v: not v["enable_dynamic_multi_lora"] or bool(v["lora_ckpt_paths_cpu"] or v["lora_ckpt_json"]),
        "false, unless lora_ckpt_paths_cpu or lora_ckpt_json lists the adapters in host memory that can be loaded",
        LORA,
        breaks={"enable_dynamic_multi_lora": True, "lora_ckpt_paths": {"one": "one"}},
        keeps={"enable_dynamic_multi_lora": True, "lora_ckpt_json": "adapters.json"},
    ),
)

LORA_SERVING_NOTES: Final = (
    Note(
        lambda v: v["base_model_quantized"] != v["outer"]["quantized"],
        "neuron_config.lora_config.base_model_quantized: it is {base_model_quantized}, but quantized, which counts, is "
        "{outer[quantized]}",
        doubtful={"base_model_quantized": True},
    ),
    Note(
        lambda v: bool(v["lora_ckpt_paths_cpu"]) and not v["enable_dynamic_multi_lora"],
        "neuron_config.lora_config.lora_ckpt_paths_cpu: adapters in host memory are never loaded because "
        "enable_dynamic_multi_lora is false",
        doubtful={"lora_ckpt_paths_cpu": {"one": "one"}},
        plain={"lora_ckpt_paths_cpu": {"one": "one"}, "enable_dynamic_multi_lora": True},
    ),
)
