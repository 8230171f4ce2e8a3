"""LoraServingConfig, and the attribute of NeuronConfig that holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from compiler_svc.adapters.config import MAX_RANK
from compiler_svc.config.attribute import LATER, Alias, Support, attribute, hint
from compiler_svc.config.domains import integer
from compiler_svc.config.rule import Note, Rule
from compiler_svc.config.tables.documents import FEATURE_LORA, LORA, UNDOCUMENTED
from compiler_svc.config.tables.general import NO_SIZE

#: Adapters are loaded and unloaded while the runtime serves, whatever the configuration says.
_ALWAYS_DYNAMIC: Final = hint(
    "adapters always come and go, by LoadAdapter and UnloadAdapter of the runtime; requests evict them",
    acts_as=True,
)
_OWN_LAYOUT: Final = hint("kernels take A and B in a layout of their own")
_DIVIDED_AS_LAYERS: Final = hint(
    "of A and B, ranks divide the one with the axis along which they divide the layer; each has the other one whole",
    acts_as=False,
)
_NO_BASE_SLOT: Final = hint("requests without an adapter are always served, and need no slot")
_ROWS_OF_STEPS: Final = hint("steps have the rows that the batch sizes of neuron_config say")


@dataclass(frozen=True, kw_only=True)
class LoraServingConfig:
    """Which LoRA adapters are served, and how their weights are kept. See `kiln.config.v1.LoraServingConfig`.

    `lora_ckpt_paths` and `lora_ckpt_paths_cpu` map adapter ids to checkpoint paths.
    """

    max_loras: int = attribute(
        LORA, integer(1), default=1, note="plans and compiles raise it to the number of the adapters listed for devices"
    )
    max_lora_rank: int = attribute(
        FEATURE_LORA,
        integer(1, MAX_RANK),
        default=16,
        note="plans and compiles raise it to the ranks of the adapters' files",
    )
    max_cpu_loras: int = attribute(
        LORA,
        integer(1),
        default=100,
        neuron=NO_SIZE,
        note="plans and compiles raise it to the number of the adapters listed for hosts",
    )
    enable_dynamic_multi_lora: bool = attribute(
        LORA,
        default=False,
        cpu=_ALWAYS_DYNAMIC,
        compiled=_ALWAYS_DYNAMIC,
        aliases=(Alias("enable-dynamic-multi-lora"), Alias("dynamic_multi_lora")),
        neuron=NO_SIZE,
        note="true needs no adapters that are listed",
    )
    lora_ckpt_paths: dict[str, str] = attribute(LORA, default={})
    lora_ckpt_paths_cpu: dict[str, str] = attribute(LORA, default={})
    lora_ckpt_json: str | None = attribute(LORA)
    lora_memory_transpose: bool = attribute(LORA, default=True, cpu=_OWN_LAYOUT, compiled=_OWN_LAYOUT, neuron=NO_SIZE)
    lora_shard_linear_layer: bool = attribute(
        LORA,
        default=True,
        cpu=_DIVIDED_AS_LAYERS,
        compiled=_DIVIDED_AS_LAYERS,
        note="plans for Neuron count what NxD Inference makes of it; plans for cpu what ranks have, as with false",
    )
    base_model_quantized: bool = attribute(
        LORA,
        default=False,
        neuron=NO_SIZE,
        note="quantized says whether the model's matrices are; a warning names a contradiction",
    )
    target_modules: tuple[str, ...] = attribute(
        UNDOCUMENTED,
        default=(),
        note="unset: those of the listed adapters; all linear layers but the head if there are none, or if one of them "
        "names its modules by a regular expression or in a pickle",
    )
    lora_bias: Literal["none", "all", "lora_only"] = attribute(
        UNDOCUMENTED, default="none", cpu=Support("honoured", values=("none",)), neuron=NO_SIZE
    )
    eviction_policy: Literal["lru", "lfu"] = attribute(UNDOCUMENTED, default="lru", neuron=NO_SIZE)
    lfu_decay_period: int = attribute(UNDOCUMENTED, integer(1), default=128, cpu=LATER, neuron=NO_SIZE)
    enable_base_model_only: bool = attribute(
        UNDOCUMENTED, default=False, cpu=_NO_BASE_SLOT, compiled=_NO_BASE_SLOT, neuron=NO_SIZE
    )
    batch_size: int = attribute(
        UNDOCUMENTED, integer(1), default=1, cpu=_ROWS_OF_STEPS, compiled=_ROWS_OF_STEPS, neuron=NO_SIZE
    )


@dataclass(frozen=True, kw_only=True)
class LoraAttributes:
    """LoRA adapters; None compiles the model alone."""

    lora_config: LoraServingConfig | None = attribute(LORA)


LORA_SERVING_RULES: Final = (
    Rule(
        ("lora_ckpt_json", "lora_ckpt_paths", "lora_ckpt_paths_cpu"),
        lambda v: not (v["lora_ckpt_json"] and (v["lora_ckpt_paths"] or v["lora_ckpt_paths_cpu"])),
        "nothing, because adapters are listed in lora_ckpt_paths or lora_ckpt_paths_cpu: one or the other",
        LORA,
        breaks={"lora_ckpt_json": "adapters.json", "lora_ckpt_paths": {"one": "one"}},
        keeps={"lora_ckpt_json": "adapters.json"},
    ),
)

LORA_SERVING_NOTES: Final = (
    Note(
        lambda v: v["base_model_quantized"] != v["outer"]["quantized"],
        "neuron_config.lora_config.base_model_quantized: it is {base_model_quantized}, but quantized, which counts, is "
        "{outer[quantized]}",
        doubtful={"base_model_quantized": True},
    ),
)
