"""A submodel as a front end takes it: a module with named inputs, and all that its tensors are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from bundle.manifest import TensorSpec


@dataclass(frozen=True, kw_only=True)
class Submodel:
    """A submodel of one rank. Its module takes inputs by name, each None by default, and returns outputs in their order
    here. State are buffers, which it assigns anew, but for those that `reads` names, which other submodels write.
    Weights are parameters under the names of the shard.
    """

    module: nn.Module
    examples: Mapping[str, Tensor]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    state: tuple[TensorSpec, ...]
    weights: frozenset[str]
    reads: frozenset[str] = frozenset()

    def put_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Makes tensors the buffers that the next step reads."""
        for name, tensor in tensors.items():
            owner, _, own_name = name.rpartition(".")
            setattr(self.module.get_submodule(owner), own_name, tensor)


#: Makes a submodel of a JSON document; other packages than this one know how.
MakeSubmodel = Callable[[dict[str, Any]], Submodel]
