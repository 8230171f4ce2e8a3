"""Bytes of one rank's keys and values.

    slots:   (max_batch_size + 1 scratch row) * positions
    blocks:  (pa_num_blocks + 1 scratch block) * pa_block_size
    each position: over the layers, 2 * rank's KV heads * head_dim * item

Positions are `max_length`. With flash decoding, the ranks that share a KV head divide them, and each rank has 128 more
positions for writes that are discarded, as in NxD Inference. A quantized cache has items of one byte and no scales.
"""

from __future__ import annotations

from typing import Final

from compiler_svc.config import NeuronConfig
from compiler_svc.models.description import ModelDescription, StateSpec
from compiler_svc.planning.weights import item_bytes_of

_QUANTIZED_ITEM_BYTES: Final = 1
_FLASH_DECODING_SPARE: Final = 128


def measure_kv(model: ModelDescription, config: NeuronConfig) -> int:
    """Measures the KV cache of one rank, in bytes; all ranks need the same."""
    item_bytes = _QUANTIZED_ITEM_BYTES if config.kv_cache_quant else item_bytes_of(config.torch_dtype)
    items = sum(
        count_positions(state, config) * 2 * state.heads.layout(config.tp_degree).num_kv_heads * state.heads.head_dim
        for state in model.states
    )
    return items * item_bytes + _measure_hidden_states(model, config)


def count_positions(state: StateSpec, config: NeuronConfig) -> int:
    """Counts the positions for which a rank keeps a layer's keys and values."""
    if config.is_block_kv_layout:
        return (config.pa_num_blocks + 1) * config.pa_block_size
    return (config.max_batch_size + 1) * _row_positions(state, config)


def _row_positions(state: StateSpec, config: NeuronConfig) -> int:
    group = min(config.tp_degree, state.heads.num_query_heads) // state.heads.num_kv_heads
    if not config.flash_decoding_enabled or group <= 1:
        return config.max_length
    return -(-config.max_length // group) + _FLASH_DECODING_SPARE


def _measure_hidden_states(model: ModelDescription, config: NeuronConfig) -> int:
    """Measures EAGLE's ring of the target's hidden states: two speculations for each row and a scratch row."""
    if not config.enable_eagle_speculation:
        return 0
    rows = config.max_batch_size + 1
    return rows * 2 * config.speculation_length * model.hidden_size * item_bytes_of(config.torch_dtype)
