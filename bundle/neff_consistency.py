"""Checks that the tensor map of a NEFF fits the executable and the state that it belongs to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from bundle.abi.neff import NeffInput, NeffOutput, NeffProgram
from bundle.manifest import Executable, Manifest

#: Dtype and shape of each tensor that inputs or outputs of one kind may be, by name.
_Described = Mapping[str, tuple[str, tuple[int, ...]]]


def find_neff_problems(path: str, program: NeffProgram, executable: Executable, manifest: Manifest) -> Iterator[str]:
    """Yields what does not fit: tensors that are missing, named twice, of another form, or in the wrong memory."""
    state: _Described = {one.name: (one.dtype, one.shape) for one in manifest.state.tensors}
    weights = _describe_weights(executable, manifest)
    inputs: dict[str, _Described] = {
        "input": {one.name: (one.dtype, one.shape) for one in executable.inputs},
        "weight": weights,
        "state": {name: state[name] for name in executable.state if name in state},
    }
    outputs: dict[str, _Described] = {
        "output": {one.name: (one.dtype, one.shape) for one in executable.outputs},
        "state": inputs["state"],
    }
    yield from _find_misfits(f"{path}.inputs", program.inputs, inputs, list(inputs))
    # A program may leave a state tensor as it is, and then has no output for it.
    yield from _find_misfits(f"{path}.outputs", program.outputs, outputs, ["output"])
    by_name = {one.name: one for one in program.inputs}
    for output in program.outputs:
        shared = by_name.get(output.alias)
        if output.kind == "state" and (shared is None or (shared.kind, shared.tensor) != ("state", output.tensor)):
            accepted = f"the input of state {output.tensor}"
            yield f"{path}.outputs[{output.name}].alias is {output.alias!r}; accepted: {accepted}"
        if output.kind == "output" and output.alias:
            yield f"{path}.outputs[{output.name}].alias is {output.alias!r}; accepted: none, as it is no state"


def _describe_weights(executable: Executable, manifest: Manifest) -> _Described:
    """Describes the weights by names of constants. All ranks run one NEFF, so rank 0 stands for all."""
    tensors = {
        (weight_set.name, tensor.name): (tensor.dtype, tensor.shape)
        for weight_set in manifest.weight_sets
        for shard in weight_set.shards[:1]
        for tensor in shard.tensors
    }
    found = {one.name: tensors.get((one.weight_set, one.tensor)) for one in executable.constants}
    return {name: described for name, described in found.items() if described is not None}


def _find_misfits(
    path: str,
    entries: tuple[NeffInput, ...] | tuple[NeffOutput, ...],
    described: Mapping[str, _Described],
    complete: list[str],
) -> Iterator[str]:
    for name, count in Counter(one.name for one in entries).items():
        if count > 1:
            yield f"{path} has {count} entries named {name!r}"
    for (kind, tensor), count in Counter((one.kind, one.tensor) for one in entries).items():
        if count > 1:
            yield f"{path} has {count} entries of {kind} {tensor!r}"
    for entry in entries:
        expected = described[entry.kind].get(entry.tensor)
        if expected is None:
            accepted = ", ".join(sorted(described[entry.kind])) or "none"
            yield f"{path}[{entry.name}] is {entry.kind} {entry.tensor!r}; accepted: {accepted}"
        elif expected != (entry.dtype, entry.shape):
            dtype, shape = expected
            yield f"{path}[{entry.name}] is {entry.dtype} {list(entry.shape)}; accepted: {dtype} {list(shape)}"
    for wanted in complete:
        for tensor in sorted(described[wanted].keys() - {one.tensor for one in entries if one.kind == wanted}):
            yield f"{path} has no entry of {wanted} {tensor!r}"
