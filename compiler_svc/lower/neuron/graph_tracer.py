"""Traces a submodel by torch-xla and checks its graph. Nothing is compiled, and no tensor takes memory.

Weights, state and inputs are placeholders on an XLA device of the CPU: parameters of the graph, as in a lowering. Only
functions import torch-xla, which the interpreter alone may have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pkgutil import resolve_name
from typing import Any, Final

import torch
from torch import Tensor

from compiler_svc.lower.errors import NeuronTraceFailed
from compiler_svc.lower.neuron.hlo import read_hlo
from compiler_svc.lower.neuron.hlo_check import Finding, check_hlo, find_missing, find_unaliased
from compiler_svc.lower.neuron.largest import make_operators
from compiler_svc.lower.neuron.request import CheckedGraph, GraphRequest
from compiler_svc.lower.neuron.submodel import MakeSubmodel, Submodel
from compiler_svc.lower.neuron.xla_model import PACKAGE
from compiler_svc.lower.xla import register_operators
from targets.neuron import TOP_K_WAYS

#: Of what torch-xla says; the traces of its C++ behind that are long.
_MAX_CAUSE_CHARS: Final = 500
#: HLO's names of types that torch-xla has, and its table of torch's dtypes has not.
_FLOAT8: Final = {torch.float8_e4m3fn: "f8e4m3fn", torch.float8_e5m2: "f8e5m2"}


def _call_argmax(values: Tensor) -> Tensor:
    (places,) = _call("AwsNeuronArgMax", values, {torch.int64: values.shape[:-1]}, str(values.dim() - 1))
    return places


def _call_top_k(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    shape = (*values.shape[:-1], count)
    largest, places = _call("AwsNeuronTopK", values, {values.dtype: shape, torch.uint32: shape}, str(count))
    return largest, places


def _call(target: str, operand: Tensor, results: Mapping[torch.dtype, Sequence[int]], config: str) -> list[Tensor]:
    """A custom call of one operand, as Neuron's packages make it, which need not be there."""
    make = import_module(PACKAGE)._XLAC._xla_custom_call  # noqa: SLF001 - torch-xla's own functions call it so
    shapes, dtypes = [list(shape) for shape in results.values()], list(results)
    made: list[Tensor] = make([operand], target, shapes, dtypes, False, config, 0, {})
    return made


_OPERATORS: Final = {way: make_operators(_call_argmax, _call_top_k, most) for way, most in TOP_K_WAYS.items()}


@dataclass(frozen=True, slots=True)
class TracedSubmodel:
    """The graph of a submodel. Mistakes are inputs and buffers that it does not read, and buffers that it does not
    assign anew.
    """

    graph: bytes
    mistakes: tuple[Finding, ...]


def check_submodel(request: GraphRequest) -> CheckedGraph:
    """Makes a submodel, traces it and checks its graph."""
    make_submodel: MakeSubmodel = resolve_name(request.make_module)
    with torch.device("meta"):
        submodel = make_submodel(request.document)
    try:
        traced = _trace(submodel, _OPERATORS[request.top_k])
    except Exception as error:
        # Errors of many kinds: an operator without a lowering reads values, and a placeholder has none.
        cause = f"{type(error).__name__}: {error}"[:_MAX_CAUSE_CHARS]
        raise NeuronTraceFailed(request.tag, cause, "") from error
    found = check_hlo(read_hlo(traced.graph), target=request.target, memory_bytes=request.memory_bytes)
    return CheckedGraph((*found, *traced.mistakes))


@torch.no_grad()
def _trace(submodel: Submodel, operators: Mapping[str, Callable[..., Any]]) -> TracedSubmodel:
    library = import_module(PACKAGE)._XLAC  # noqa: SLF001 - what gives graphs has no public name
    module = submodel.module
    inputs = _make_placeholders(submodel.examples)
    state = _make_placeholders({one.name: module.get_buffer(one.name) for one in submodel.state})
    module.load_state_dict(
        _make_placeholders({name: module.get_parameter(name) for name in submodel.weights}), assign=True, strict=False
    )
    submodel.put_state(state)
    versions = _read_versions(state)
    with register_operators(**operators):
        outputs = module(**inputs)
    assigned = {name: module.get_buffer(name) for name in state}
    written = {name for name, version in _read_versions(state).items() if version != versions[name]}
    kept = written | {name for name, tensor in assigned.items() if tensor is state[name]} - submodel.reads
    results = [*outputs, *assigned.values()]
    graph: bytes = library._get_xla_tensors_hlo_proto(results)  # noqa: SLF001 - as above
    read = set(library._get_tensors_xla_device_data_node(results)[0])  # noqa: SLF001 - as above

    def list_mistakes() -> Iterator[Finding]:
        yield from map(find_unaliased, sorted(kept))
        for noun, tensors in (("input", inputs), ("buffer", state)):
            for name, tensor in tensors.items():
                if library._xla_get_tensor_id(tensor) not in read:  # noqa: SLF001 - as above
                    yield find_missing(noun, name)

    return TracedSubmodel(graph, tuple(list_mistakes()))


def _make_placeholders(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: _make_placeholder(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def _make_placeholder(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    builder = import_module(f"{PACKAGE}.core.xla_builder")
    if dtype not in _FLOAT8:
        made: Tensor = builder.create_placeholder_tensor(shape, dtype)
    else:
        library = import_module(PACKAGE)._XLAC  # noqa: SLF001 - what `create_placeholder_tensor` calls
        made = library._xla_create_placeholder_tensor(builder.mkshape(_FLOAT8[dtype], shape).shape)  # noqa: SLF001
    return made


def _read_versions(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """How often each tensor has been written in place."""
    return {name: tensor._version for name, tensor in tensors.items()}  # noqa: SLF001 - torch's only name for it
