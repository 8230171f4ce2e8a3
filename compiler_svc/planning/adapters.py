"""Bytes of one rank's LoRA adapters.

Each target module of `in` inputs and `out` outputs has A [max_loras, in, r] and B [max_loras, r, out], with r the
largest rank. Of the two, the one on the side that tensor parallelism divides is divided with it: B of column-parallel
modules, A of row-parallel ones. The other is "the linear layer", which every rank holds whole, or which is divided,
too, with `lora_shard_linear_layer`. B of keys and values is copied as their heads are.
"""

from __future__ import annotations

from typing import Final

from compiler_svc.config import NeuronConfig
from compiler_svc.models.head_layout import lay_out_heads
from compiler_svc.models.llama_config import LlamaConfig
from compiler_svc.models.shares import share_of
from compiler_svc.planning.weights import item_bytes_of

#: Modules of a layer that adapters can change.
TARGET_MODULES: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ROW_PARALLEL: Final = ("o_proj", "down_proj")


def measure_adapters(model: LlamaConfig, config: NeuronConfig) -> int:
    """Bytes of the adapters that one rank has room for; 0 where none are served.

    Without `target_modules` every linear module of a layer counts: adapters may change all of them.
    """
    lora = config.lora_config
    if lora is None:
        return 0
    targets = lora.target_modules or TARGET_MODULES
    items = sum(
        _count_items(model, name, config.tp_degree, is_sharded=lora.lora_shard_linear_layer)
        for name in TARGET_MODULES
        if name in targets
    )
    per_adapter = items * model.num_hidden_layers * lora.max_lora_rank * item_bytes_of(config.torch_dtype)
    return lora.max_loras * per_adapter


def _count_items(model: LlamaConfig, module: str, tp_degree: int, *, is_sharded: bool) -> int:
    """Items of A and B in one rank, for one adapter of rank 1."""
    inputs, outputs = _features(model, module)
    divided, linear = (inputs, outputs) if module in _ROW_PARALLEL else (outputs, inputs)
    return _share(model, module, divided, tp_degree) + (share_of(linear, tp_degree) if is_sharded else linear)


def _share(model: LlamaConfig, module: str, features: int, tp_degree: int) -> int:
    heads = lay_out_heads(model.num_attention_heads, model.num_key_value_heads, tp_degree)
    match module:
        case "q_proj" | "o_proj":
            return heads.num_query_heads * model.head_dim
        case "k_proj" | "v_proj":
            return heads.num_kv_heads * model.head_dim
        case _:
            return share_of(features, tp_degree)


def _features(model: LlamaConfig, module: str) -> tuple[int, int]:
    """Inputs and outputs of a module."""
    queries, keys = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    match module:
        case "q_proj":
            return model.hidden_size, queries
        case "k_proj" | "v_proj":
            return model.hidden_size, keys
        case "o_proj":
            return queries, model.hidden_size
        case "down_proj":
            return model.intermediate_size, model.hidden_size
        case _:
            return model.hidden_size, model.intermediate_size
