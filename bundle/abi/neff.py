"""What the manifest says of an executable that is a NEFF: which of its tensors is which tensor of the ABI.

A NEFF names its tensors by their place (`input0`, `output3`). Weights and state are inputs like all others. State that
a step writes is an output too, whose memory is that of the input.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from bundle.abi.tensor import DType

#: As in the field of libnrt's `nrt_tensor_info`, which ends with a zero byte.
NeffName = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]


class NeffInput(msgspec.Struct, frozen=True, kw_only=True):
    """One input of a NEFF."""

    #: Name in the NEFF, such as `input0`.
    name: NeffName
    kind: Literal["input", "weight", "state"]
    #: Name of the ABI's input, of the constant in `Executable.constants`, or of the state tensor.
    tensor: str
    dtype: DType
    shape: tuple[int, ...]


class NeffOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One output of a NEFF."""

    #: Name in the NEFF, such as `output0`.
    name: NeffName
    kind: Literal["output", "state"]
    #: Name of the ABI's output, or of the state tensor.
    tensor: str
    dtype: DType
    shape: tuple[int, ...]
    #: Name of the NEFF's input whose memory the output shares; empty: it has memory of its own. State always shares.
    alias: str = ""


class NeffProgram(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to call a NEFF."""

    inputs: tuple[NeffInput, ...]
    outputs: tuple[NeffOutput, ...]
    #: Whether it exchanges tensors with other ranks, so that it is loaded with their number.
    is_collective: bool = False
    #: Arguments that the Neuron compiler got, in order.
    compiler_flags: tuple[str, ...] = ()
