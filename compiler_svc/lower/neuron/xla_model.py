"""The submodels that front ends trace, on an XLA device: what NEFFs should compute, where there is no core.

All ranks are in one graph, on one device. Only functions import torch-xla, which the interpreter alone may have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor

from compiler_svc.lower.neuron.rank_turns import RankTurns
from compiler_svc.lower.neuron.submodel import MakeSubmodel, Submodel
from compiler_svc.lower.xla import register_operators
from execution.collectives.operators import join_by_communicator, sum_by_communicator

#: Values of an input, row-major.
Values = Sequence[float]
PACKAGE: Final = "torch_xla"


class XlaModel:
    """A bundle's submodels, over one set of weights and one KV cache for each rank."""

    def __init__(self, make_module: str, documents: Mapping[str, dict[str, Any]], shards: Sequence[Path]) -> None:
        """Puts the weights on the device.

        `make_module` is `module:function`, a `MakeSubmodel`. The documents are the submodels as JSON, by the tags of
        their executables; the shards are the safetensors file of each rank.
        """
        xla = import_module(PACKAGE)
        self._sync, self._device = xla.sync, xla.device()
        self._make: MakeSubmodel = resolve_name(make_module)
        self._documents = documents
        self._turns = RankTurns(len(shards))
        self._weights = [{name: tensor.to(self._device) for name, tensor in load_file(path).items()} for path in shards]
        self._state: list[dict[str, Tensor]] = [{} for _ in shards]
        self._made: dict[str, list[Submodel]] = {}

    @torch.no_grad()
    def run(self, tag: str, inputs: Mapping[str, Values]) -> dict[str, Tensor]:
        """Runs one step. The inputs are at least those of the submodel. Returns for each output what all ranks return,
        [ranks, *shape of the output], on the CPU.
        """
        submodels = self._made.get(tag) or self._load(tag)
        given = {
            name: torch.tensor(inputs[name], dtype=example.dtype).view(example.shape).to(self._device)
            for name, example in submodels[0].examples.items()
        }
        for submodel, state in zip(submodels, self._state, strict=True):
            submodel.put_state(state)
        with register_operators(all_reduce=sum_by_communicator, all_gather=join_by_communicator):
            results = self._turns.run([partial(_call, one, given) for one in submodels])
        for submodel, state in zip(submodels, self._state, strict=True):
            state.update({one.name: submodel.module.get_buffer(one.name) for one in submodel.state})
        # All that is pending, outputs and state, is one graph.
        self._sync()
        names = [spec.name for spec in submodels[0].outputs]
        return {name: torch.stack([result[place].cpu() for result in results]) for place, name in enumerate(names)}

    def write_adapter(self, slot: int, paths: Sequence[Path]) -> None:
        """Writes an adapter into a slot of each rank, from its safetensors file. A step has run."""
        for weights, path in zip(self._weights, paths, strict=True):
            for name, tensor in load_file(path).items():
                slots = weights[name].cpu()
                slots[slot] = tensor
                weights[name] = slots.to(self._device)
        for made in self._made.values():
            self._bind(made)

    def _bind(self, made: Sequence[Submodel]) -> None:
        for submodel, weights in zip(made, self._weights, strict=True):
            submodel.module.load_state_dict(weights, assign=True, strict=False)

    def _load(self, tag: str) -> list[Submodel]:
        made = [self._make(self._documents[tag]) for _ in self._weights]
        for submodel, weights, state in zip(made, self._weights, self._state, strict=True):
            # Adapters are in no shard: their slots are empty so far.
            for name, parameter in submodel.module.named_parameters():
                if name not in weights:
                    weights[name] = torch.zeros_like(parameter, device=self._device)
            for one in submodel.state:
                state.setdefault(one.name, submodel.module.get_buffer(one.name).to(self._device))
        self._bind(made)
        self._made[tag] = made
        return made


@torch.no_grad()
def _call(submodel: Submodel, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    returned: tuple[Tensor, ...] = submodel.module(**inputs)
    return returned
