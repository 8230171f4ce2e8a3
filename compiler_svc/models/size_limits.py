"""How large the sizes of a model may be: stated once, and held against before anything loops over a size.

The limits are four to thirty times the sizes of the largest published models. A configuration of a few bytes can name
any number, and the tables that plans make are as long as the number says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

#: The largest integer of an attribute that has no limit of its own.
MAX_INTEGER: Final = 2**31 - 1

#: The longest sequence, in tokens: of a model's training, and of what a configuration compiles.
MAX_POSITIONS: Final = 1 << 27

#: Logits that a step holds at a time while it tells how likely tokens of prompts are: 64 MiB.
MAX_TOLD_LOGITS: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class SizeLimit:
    """A limit of one kind of size, for the attributes of a `config.json` that have it in one family or another.

    `held_by` is what a checkpoint's tensor headers have at least as many of, so that they limit the value further:
    `tensors`, or entries along an `axis`. None if headers say nothing about it.
    """

    largest: int
    names: tuple[str, ...]
    held_by: Literal["tensors", "axis"] | None = None


_LIMITS: Final = (
    SizeLimit(512, ("num_hidden_layers", "n_layer", "n_layers"), "tensors"),
    SizeLimit(1024, ("num_attention_heads", "num_key_value_heads", "n_head", "n_heads"), "axis"),
    SizeLimit(1 << 14, ("head_dim", "rotary_dim"), "axis"),
    SizeLimit(1 << 13, ("num_experts", "num_local_experts", "n_routed_experts")),
    SizeLimit(
        1 << 20,
        (
            *("hidden_size", "n_embd", "n_embed", "d_model", "word_embed_proj_dim"),
            *("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner"),
        ),
        "axis",
    ),
    SizeLimit(1 << 23, ("vocab_size",), "axis"),
    SizeLimit(
        MAX_POSITIONS,
        (
            *("max_position_embeddings", "original_max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"),
            "sliding_window",
        ),
    ),
)

#: The limit of each attribute that has one.
SIZE_LIMITS: Final = {name: limit for limit in _LIMITS for name in limit.names}


def find_largest_value(name: str) -> int:
    """Finds the largest value of an integer attribute."""
    limit = SIZE_LIMITS.get(name)
    return MAX_INTEGER if limit is None else limit.largest
