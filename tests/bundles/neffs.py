"""Manifests whose executables are NEFFs."""

from __future__ import annotations

from typing import Any

import msgspec

from bundle.abi.neff import NeffInput, NeffOutput, NeffProgram
from bundle.manifest import Executable, Manifest, Target


def map_tensors(executable: Executable, manifest: Manifest, **changes: Any) -> NeffProgram:
    """The tensor map of a NEFF that takes inputs, then weights, then state, and writes all of the state."""
    weights = {
        (weight_set.name, tensor.name): tensor
        for weight_set in manifest.weight_sets
        for tensor in weight_set.shards[0].tensors
    }
    states = {tensor.name: tensor for tensor in manifest.state.tensors}
    taken: list[tuple[Any, str, Any]] = [("input", spec.name, spec) for spec in executable.inputs]
    taken += [("weight", one.name, weights[one.weight_set, one.tensor]) for one in executable.constants]
    taken += [("state", name, states[name]) for name in executable.state]
    inputs = tuple(
        NeffInput(name=f"input{index}", kind=kind, tensor=name, dtype=of.dtype, shape=of.shape)
        for index, (kind, name, of) in enumerate(taken)
    )
    places = {one.tensor: one.name for one in inputs if one.kind == "state"}
    given: list[tuple[Any, str, Any]] = [("output", spec.name, spec) for spec in executable.outputs]
    given += [("state", name, states[name]) for name in executable.state]
    outputs = tuple(
        NeffOutput(
            name=f"output{index}", kind=kind, tensor=name, dtype=of.dtype, shape=of.shape, alias=places.get(name, "")
        )
        for index, (kind, name, of) in enumerate(given)
    )
    return NeffProgram(**({"inputs": inputs, "outputs": outputs} | changes))


def with_neffs(manifest: Manifest, *, architecture: str = "cayman", lnc: int = 2, **changes: Any) -> Manifest:
    """The same bundle with NEFFs for executables, on trn2 unless said otherwise.

    Args:
        changes: Fields of every tensor map that are otherwise.
    """
    executables = tuple(
        msgspec.structs.replace(
            one, format="neff", state_convention="aliased", neff=map_tensors(one, manifest, **changes)
        )
        for one in manifest.executables
    )
    target = Target(kind="trn2", isa="", architecture=architecture, lnc=lnc)
    return msgspec.structs.replace(manifest, executables=executables, target=target)
