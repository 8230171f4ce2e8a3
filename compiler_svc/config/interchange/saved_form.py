"""What NxD Inference's files have and documents do not, or spell differently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: Attributes that every saved NeuronConfig has, and that users do not set by hand.
MARKS: Final = frozenset({"local_ranks_size", "world_size", "start_rank_id"})

#: Attributes of NeuronConfig that are saved, but derived again when a file is read.
DERIVED: Final = frozenset(
    (
        "buckets",
        "enable_long_context_mode",
        "enable_token_tree",
        "is_chunked_prefill",
        "is_hidden_dim_shuffled",
        "is_intermediate_dim_shuffled",
        "is_prefill_stage",
        "kv_cache_tiling",
        "kv_cache_update_with_kernel",
        "overrides_torch_dtype",
        "tile_cc",
    )
)

#: The same of InferenceConfig.
DERIVED_OUTSIDE: Final = frozenset({"num_cores_per_group"})

#: Attributes whose values are classes.
CLASSES: Final = frozenset({"worker_cls", "draft_model_cls", "blockwise_nki_autograd_cls"})

#: NeuronConfig's spelling of MoEFusedTKGConfig's attributes.
FUSED_TKG_NAMES: Final = {
    "moe_fused_nki_kernel_enabled": "moe_fused_kernel_enabled",
    "router_topk_nki_kernel_enabled": "router_topk_kernel_enabled",
    "expert_mlp_nki_kernel_enabled": "expert_mlp_kernel_enabled",
    "shared_mlp_nki_kernel_enabled": "shared_mlp_kernel_enabled",
}
FUSED_TKG: Final = "moe_fused_tkg_config"

#: NeuronConfig's keywords for attributes of configurations inside, by the name of the configuration.
FLAT_NAMES: Final = {
    FUSED_TKG: FUSED_TKG_NAMES,
    "router_config": {"router_act_fn": "act_fn", "router_dtype": "dtype"},
}


def is_saved(document: Mapping[str, Any]) -> bool:
    """Whether NxD Inference wrote the document."""
    neuron_config = document.get("neuron_config")
    return isinstance(neuron_config, Mapping) and neuron_config.keys() >= MARKS


def write_class(path: str) -> dict[str, str] | str:
    """A class such as `module.Class` as the files name it; one without a module stays as it is."""
    module, _, name = path.rpartition(".")
    return {"__module__": module, "__name__": name} if module else path


def read_plain(name: str, value: Any) -> Any:
    """A class or an enumeration's member, which the files spell as objects, as text; other values as they are."""
    if isinstance(value, Mapping):
        if name in CLASSES and value.keys() == {"__module__", "__name__"}:
            return f"{value['__module__']}.{value['__name__']}"
        if "_name_" in value:
            return value["_name_"]
    return value
