"""The state of executables: the tensors of the KV cache, one of each kind per layer."""

from __future__ import annotations

from typing import Final

#: Kinds of tensors of a layer, in calling order.
KINDS: Final = ("k_cache", "v_cache")

#: Meaning of each axis of a tensor. The last slot is the scratch slot, which no request holds.
AXES: Final = ("slot", "kv_head", "position", "head_dim")
#: The same in a cache made of blocks. The last block is the scratch block.
BLOCK_AXES: Final = ("block", "kv_head", "position", "head_dim")


def state_names(num_layers: int) -> tuple[str, ...]:
    """Lists the names of the KV cache tensors in calling order: every kind of layer 0, then of layer 1, …"""
    return tuple(f"{kind}.{layer}" for layer in range(num_layers) for kind in KINDS)
