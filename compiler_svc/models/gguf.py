"""What differs between families in GGUF files, whose names of architectures, modules and attributes are their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

#: Modules of layers that some families have.
HEAD_NORMS: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
SANDWICH_NORMS: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
#: Keys of attributes that some families have.
WINDOW: Final = {"attention.sliding_window": "sliding_window"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """How files have the models of a family.

    Attributes:
        name: The architecture's name in files.
        names: Modules of a layer, by what files call them, beside those that all families have.
        keys: Attributes by further keys, which a file may lack.
        turns_neighbours: Whether files have the rows of queries and keys in an order that rotates neighbours.
        norm_offset: What files add to the weights of norms.
        large_layers: Layers of the model whose queries are scaled by the hidden size's share of a head, not by
            `head_dim`; 0: the attribute is not read.
    """

    name: str
    names: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    turns_neighbours: bool = False
    norm_offset: float = 0.0
    large_layers: int = 0
