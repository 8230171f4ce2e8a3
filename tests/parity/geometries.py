"""The models that parity is shown for: every family; ratios of query to KV heads, heads that need padding, ropes."""

from __future__ import annotations

from typing import Any, Final

from tests.checkpoints.families import FAMILIES
from tests.checkpoints.shown_family import DEFAULTS

#: Hugging Face's name of the architecture, by the geometry's name.
ARCHITECTURES: Final[dict[str, str]] = {
    name: architecture for architecture, family in FAMILIES.items() for name in family.parity
}
#: Arguments of the architecture's configuration in transformers, by the geometry's name.
GEOMETRIES: Final[dict[str, dict[str, Any]]] = {
    name: DEFAULTS | {"max_position_embeddings": 512} | shape
    for family in FAMILIES.values()
    for name, shape in family.parity.items()
}
#: Those of the Llama family.
LLAMA_GEOMETRIES: Final = {name: GEOMETRIES[name] for name in FAMILIES["LlamaForCausalLM"].parity}


def count_kv_heads(config: dict[str, Any]) -> int:
    """KV heads of a geometry."""
    count: int = config.get("num_key_value_heads", config["num_attention_heads"])
    return count


def find_rope_type(config: dict[str, Any]) -> str:
    """The kind of a geometry's rotary embedding; of layers that attend to all positions, if others have another.

    `none` if it names none.
    """
    rope: dict[str, Any] = config.get("rope_parameters", {"rope_type": "none"})
    kind: str = rope.get("full_attention", rope)["rope_type"]
    return kind
