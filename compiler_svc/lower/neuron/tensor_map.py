"""The tensors of a NEFF: which of its names is which input, output, weight or state. The tracer describes them beside
the graph ("metaneff"). Input `i` of the NEFF is called `input{i}`, output `i` `output{i}`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from bundle.abi.neff import NeffInput, NeffOutput, NeffProgram
from bundle.abi.tensor import DTYPES, DType
from compiler_svc.lower.neuron.hlo_check import find_missing, find_unaliased
from compiler_svc.lower.neuron.submodel import Submodel

#: Values of `MetaTensor.Type`.
_KINDS: Final[Mapping[int, Literal["input", "state", "weight"]]] = {1: "input", 2: "state", 3: "weight"}
_DTYPES: Final[Mapping[int, DType]] = {item.metaneff: name for name, item in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorMap:
    """The tensors of a NEFF, and what a caller by the ABI could not do with them: `mistakes` has a sentence for each
    tensor that is missing, has another form, or is none of the submodel's.
    """

    inputs: tuple[NeffInput, ...]
    outputs: tuple[NeffOutput, ...]
    mistakes: tuple[str, ...]

    def to_program(self, *, is_collective: bool, flags: tuple[str, ...]) -> NeffProgram:
        """Describes the NEFF for the manifest."""
        return NeffProgram(inputs=self.inputs, outputs=self.outputs, is_collective=is_collective, compiler_flags=flags)


def map_tensors(metaneff: Any, submodel: Submodel) -> TensorMap:
    """Reads the description of a NEFF's tensors and compares it with the submodel."""
    inputs, outputs, mistakes = [], [], []
    for place, tensor in enumerate(metaneff.input_tensors):
        kind, dtype = _KINDS.get(tensor.type), _DTYPES.get(tensor.data_type)
        name = _decode(tensor.user_input_key if kind == "input" else tensor.checkpoint_key)
        if kind == "weight" and name in submodel.reads:
            # For a tracer, a buffer that no operation writes may be a weight.
            kind = "state"
        if kind is None or dtype is None:
            mistakes.append(f"input{place} {name!r} has type {tensor.type} and data type {tensor.data_type}")
            continue
        one = NeffInput(name=f"input{place}", kind=kind, tensor=name, dtype=dtype, shape=tuple(tensor.shape))
        inputs.append(one)
    states = {one.name: one.tensor for one in inputs if one.kind == "state"}
    aliases = {output: f"input{taken}" for output, taken in dict(metaneff.output_aliases_to).items()}
    names = iter(spec.name for spec in submodel.outputs)
    for place, tensor in enumerate(metaneff.output_tensors):
        dtype, alias = _DTYPES.get(tensor.data_type), aliases.get(place, "")
        # Outputs come in the order of the ABI, before, behind or between those that are state.
        name = states.get(alias, "") if alias else next(names, "")
        if not name or dtype is None:
            mistakes.append(f"output{place} has data type {tensor.data_type} and is no output of the submodel")
            continue
        outputs.append(
            NeffOutput(
                name=f"output{place}",
                kind="state" if alias else "output",
                tensor=name,
                dtype=dtype,
                shape=tuple(tensor.shape),
                alias=alias,
            )
        )
    mistakes += _compare(inputs, outputs, submodel)
    return TensorMap(tuple(inputs), tuple(outputs), tuple(mistakes))


def _compare(inputs: list[NeffInput], outputs: list[NeffOutput], submodel: Submodel) -> Iterator[str]:
    written = {one.tensor for one in outputs if one.kind == "state"}
    for spec in submodel.state:
        if spec.name not in written | submodel.reads:
            yield str(find_unaliased(spec.name))
    for found, specs, noun in (
        ([one for one in inputs if one.kind == "input"], submodel.inputs, "input"),
        ([one for one in inputs if one.kind == "state"], submodel.state, "buffer"),
        ([one for one in outputs if one.kind == "output"], submodel.outputs, "output"),
    ):
        wanted = {spec.name: (spec.dtype, spec.shape) for spec in specs}
        for name in wanted.keys() - {one.tensor for one in found}:
            yield str(find_missing(noun, name))
        for one in found:
            if one.tensor not in wanted:
                yield f"{noun} {one.tensor!r} is none of the submodel's"
            elif wanted[one.tensor] != (one.dtype, one.shape):
                dtype, shape = wanted[one.tensor]
                yield f"{noun} {one.tensor} is {one.dtype} {list(one.shape)}; accepted: {dtype} {list(shape)}"
    for one in inputs:
        if one.kind == "weight" and one.tensor not in submodel.weights:
            yield f"weight {one.tensor!r} is in no shard"


def _decode(key: bytes | str) -> str:
    return key.decode() if isinstance(key, bytes) else key
