"""The record of the models that a family is shown with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

#: Attributes of the architecture's configuration in transformers.
Attributes = dict[str, Any]

#: What a tiny model is unless its attributes say otherwise.
DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 211,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_SIZES: Final = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True, kw_only=True)
class ShownFamily:
    """What one family is shown with.

    Attributes:
        geometries: By name, for `tests/contract/families`: the first runs in `make test`, all in the long run. Prompts
            have up to 64 tokens and sequences up to 128: windows are shorter than both.
        parity: By name, for `tests/parity`: sizes that no degree divides, so that vocabulary, feed-forward and hidden
            axes are padded somewhere.
        shows: Cases of the contract suite that `make test` runs for it beside those that it runs for every family;
            None: all, of the families that have every trait together.
        options: Attributes of random models beside sizes and ropes.
        may_lack: Further ones, which may be None, too.
        fixed: Those that have one value in all random models.
        heads: Of random models. `equal` ones have keys of their own and divide the hidden size, as `derived` ones do;
            `fixed` ones have a size of their own, and `free` ones may have.
        rope: What random models rotate: heads, a share of them, as many dimensions as they say, or heads by one of two
            embeddings.
        rope_kinds: Those that transformers takes for it; empty for all.
        names: What it calls its sizes if not as most do; None: they follow from others, or are options.
        num_defaults: How many attributes beside the required ones have defaults, at least.
    """

    geometries: Mapping[str, Attributes]
    parity: Mapping[str, Attributes]
    shows: tuple[str, ...] | None = ()
    options: tuple[str, ...]
    may_lack: tuple[str, ...] = ()
    fixed: Attributes = field(default_factory=dict)
    heads: Literal["equal", "derived", "fixed", "free"] = "free"
    rope: Literal["none", "heads", "share", "dimensions", "by_layer"] = "heads"
    rope_kinds: tuple[str, ...] = ()
    names: Mapping[str, str | None] = field(default_factory=dict)
    num_defaults: int = 5

    @property
    def required(self) -> tuple[str, ...]:
        """The attributes that shape the weights, by their names in `config.json`."""
        names = (self.names.get(name, name) for name in _SIZES)
        return tuple(name for name in names if name is not None)
