"""Errors of targets.

KilnError
└── TargetError
    ├── IsaUnknown            an instruction set that executables cannot be made for
    ├── IsaUnsupported        executables made for instructions that this host lacks
    ├── ToolchainMissing      a program that a lowering calls is not installed
    ├── NeuronToolchainMissing  an interpreter that lacks packages of Neuron's
    ├── FormatUnknown         executables of a format that nothing installed here runs
    └── FormatInvalid         an installed entry point that does not give the format that it names
"""

from __future__ import annotations

from collections.abc import Sequence

from bundle.errors import FieldViolation, KilnError


class TargetError(KilnError):
    """Root of the errors of targets."""

    reason = "TARGET_ERROR"


class IsaUnknown(TargetError):
    """An instruction set that executables cannot be made for."""

    reason = "ISA_UNKNOWN"

    def __init__(self, isa: str, accepted: Sequence[str]) -> None:
        violation = FieldViolation("isa", repr(isa), ", ".join(accepted))
        super().__init__(str(violation), violations=(violation,), isa=isa)


class IsaUnsupported(TargetError):
    """Executables made for instructions that this host lacks."""

    reason = "ISA_UNSUPPORTED"

    def __init__(self, isa: str, supported: Sequence[str], known: Sequence[str]) -> None:
        accepted = ", ".join(supported) or f"none of {', '.join(known)}"
        violation = FieldViolation("target.isa", isa, accepted)
        super().__init__(
            f"this host cannot run the bundle: {violation}", violations=(violation,), isa=isa, supported=accepted
        )


class ToolchainMissing(TargetError):
    """No C++ compiler, which the optimization level needs."""

    reason = "TOOLCHAIN_MISSING"

    def __init__(self, compiler: str) -> None:
        super().__init__(
            f"no {compiler} on PATH: install it, or compile with optimization level 0, which needs none",
            compiler=compiler,
        )


class NeuronToolchainMissing(TargetError):
    """An interpreter that lacks packages of Neuron's, with which executables for Neuron cores are made."""

    reason = "NEURON_TOOLCHAIN_MISSING"

    def __init__(self, interpreter: str, missing: str) -> None:
        super().__init__(
            f"{interpreter} has no {missing}: install kiln-neuron-lowering for a Python 3.11 to 3.13 from Neuron's "
            f"package index, and name that Python by --neuron-python",
            interpreter=interpreter,
            missing=missing,
        )


class FormatUnknown(TargetError):
    """Executables of a format that nothing installed here runs."""

    reason = "EXECUTABLE_FORMAT_UNKNOWN"

    def __init__(self, name: str, known: Sequence[str]) -> None:
        violation = FieldViolation("executables.format", repr(name), ", ".join(known))
        super().__init__(f"this host cannot run the bundle: {violation}", violations=(violation,), format=name)


class FormatInvalid(TargetError):
    """An installed entry point that does not give the format that it names."""

    reason = "EXECUTABLE_FORMAT_INVALID"

    def __init__(self, name: str, entry_point: str, detail: str) -> None:
        super().__init__(
            f"executable format {name}: entry point {entry_point} {detail}",
            format=name,
            entry_point=entry_point,
            detail=detail,
        )
