"""Submodels as other compilers trace them: modules that take named inputs and hold their state as buffers.

A compiler of another interpreter gets the submodel as JSON (`submodel_document`) and builds it anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from bundle.abi.inputs import INPUTS
from bundle.abi.state import StateLayout
from bundle.manifest import TensorSpec
from compiler_svc.lower.neuron.submodel import Submodel
from compiler_svc.trace.program import SubmodelProgram, build_submodel
from compiler_svc.trace.submodel_document import read_document
from compiler_svc.trace.submodels import describe_state, list_adapter_tensors
from execution.dtypes import TORCH_DTYPES


class _StateKind(nn.Module):
    """Buffers of one kind, one for each layer, by the layer's number."""


class NamedSubmodel(nn.Module):
    """Takes the inputs of the ABI by name, each None by default, and returns the outputs.

    All submodels have one signature, which `_define_forward` adds. Parameters have the names of the shard's tensors,
    buffers those of the state's. Each buffer is assigned anew in every step, never written in place, so that a compiler
    finds which output is its.
    """

    def __init__(self, program: SubmodelProgram, state: StateLayout) -> None:
        super().__init__()
        # Not as a submodule: its parameters would have another prefix.
        self.__dict__["_program"] = program
        for name, module in program.core.named_children():
            self.add_module(name, module)
        for name, parameter in program.core.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self._state_names = tuple(tensor.name for tensor in state.tensors)
        for tensor in state.tensors:
            kind, _, layer = tensor.name.partition(".")
            if kind not in self._modules:
                self.add_module(kind, _StateKind())
            empty = torch.zeros(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype])
            self.get_submodule(kind).register_buffer(layer, empty, persistent=True)

    def run(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Runs one step on the inputs that the executable spec lists."""
        program: SubmodelProgram = self.__dict__["_program"]
        submodel = program.submodel
        state = [self.get_buffer(name) for name in self._state_names]
        results: tuple[Tensor, ...] = program(*(inputs[spec.name] for spec in submodel.inputs), *state)
        num_outputs = len(submodel.outputs)
        for name, value in zip(self._state_names, results[num_outputs:], strict=True):
            kind, _, layer = name.partition(".")
            setattr(self.get_submodule(kind), layer, value)
        return results[:num_outputs]


#: A method with its parameters by name: tracers read the signature, and take no `**inputs`.
_FORWARD: Final = """
def forward(self, {parameters}):
    given = {{{entries}}}
    return self.run({{name: value for name, value in given.items() if value is not None}})
"""


def _define_forward(names: tuple[str, ...]) -> type[NamedSubmodel]:
    """Derives the class whose `forward` has one parameter for each of the ABI's inputs, whatever rows the table has."""
    source = _FORWARD.format(
        parameters=", ".join(f"{name}=None" for name in names),
        entries=", ".join(f"{name!r}: {name}" for name in names),
    )
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    return type(NamedSubmodel.__name__, (NamedSubmodel,), {"forward": namespace["forward"]})


def make_named_submodel(document: dict[str, Any]) -> Submodel:
    """Builds the submodel of a document; see `compiler_svc.lower.neuron.submodel.MakeSubmodel`."""
    spec, tensors, submodel = read_document(document)
    state = describe_state(spec)
    module = _define_forward(tuple(INPUTS))(build_submodel(spec, tensors, submodel), state)
    return Submodel(
        module=module,
        examples={one.name: torch.zeros(one.shape, dtype=TORCH_DTYPES[one.dtype]) for one in submodel.inputs},
        inputs=submodel.inputs,
        outputs=submodel.outputs,
        state=tuple(TensorSpec(name=one.name, dtype=one.dtype, shape=one.shape) for one in state.tensors),
        weights=frozenset(tensor.name for tensor in (*tensors, *list_adapter_tensors(spec))),
    )
