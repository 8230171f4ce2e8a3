"""Instruction sets that executables can be made for."""

from __future__ import annotations

from typing import Final

from compiler_svc.lower.errors import IsaUnknown
from execution.errors import IsaUnsupported
from execution.isa import supported_isas

#: Bits of the vector registers of each level.
VECTOR_BITS: Final = {"x86-64-v3": 256, "x86-64-v4": 512}


def resolve_isa(name: str) -> str:
    """Turns `native` into the highest level that this host has, and checks other names.

    Levels, never the host's own model, so that a runtime can tell from the name whether it can run a bundle.

    Raises:
        IsaUnknown: A name that is neither a level nor `native`.
        IsaUnsupported: `native` on a host that has none of the levels.
    """
    if name == "native":
        supported = supported_isas()
        if not supported:
            raise IsaUnsupported(name, supported)
        return supported[-1]
    if name not in VECTOR_BITS:
        raise IsaUnknown(name, (*VECTOR_BITS, "native"))
    return name
