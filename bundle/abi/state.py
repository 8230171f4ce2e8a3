"""The state of executables: the tensors of the KV cache, one of each kind a layer."""

from __future__ import annotations

from typing import Final

#: Tensors of a layer, in calling order.
KINDS: Final = ("k_cache", "v_cache")

#: Meaning of each axis of a tensor. There is one slot more than requests can hold: the scratch slot, which comes last.
AXES: Final = ("slot", "kv_head", "position", "head_dim")


def state_names(num_layers: int) -> tuple[str, ...]:
    """Names of the KV cache tensors in calling order: every kind of layer 0, of layer 1, …"""
    return tuple(f"{kind}.{layer}" for layer in range(num_layers) for kind in KINDS)
