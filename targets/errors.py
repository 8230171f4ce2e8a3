"""Errors of targets."""

from __future__ import annotations

from collections.abc import Sequence

from bundle.errors import FieldViolation, KilnError, Unsaid


class TargetError(KilnError, code="FAILED_PRECONDITION"):
    """Root of the errors of targets."""


class IsaUnknown(TargetError, code="INVALID_ARGUMENT"):
    """An instruction set that executables cannot be made for."""

    violation = FieldViolation("isa", "{isa!r}", "{accepted}")
    isa: str
    accepted: Unsaid[Sequence[str]]


class IsaUnsupported(TargetError):
    """Executables made for instructions that this host lacks."""

    def __init__(self, isa: str, supported: Sequence[str], known: Sequence[str]) -> None:
        accepted = ", ".join(supported) or f"none of {', '.join(known)}"
        violation = FieldViolation("target.isa", isa, accepted)
        super().__init__(
            f"this host cannot run the bundle: {violation}", violations=(violation,), isa=isa, supported=accepted
        )


class ToolchainMissing(TargetError):
    """No C++ compiler, which the optimization level needs."""

    message = "no {compiler} on PATH: install it, or compile with optimization level 0, which needs none"
    compiler: str


class NeuronToolchainMissing(TargetError):
    """An interpreter that lacks packages of Neuron's, with which executables for Neuron cores are made."""

    message = (
        "{interpreter} has no {missing}: install kiln-neuron-lowering for a Python 3.11 to 3.13 from Neuron's package "
        "index, and name that Python by --neuron-python"
    )
    interpreter: str
    missing: str


class FormatUnknown(TargetError, reason="EXECUTABLE_FORMAT_UNKNOWN"):
    """Executables of a format that nothing installed here runs."""

    message = "this host cannot run the bundle: {violation}"
    violation = FieldViolation("executables.format", "{format!r}", "{known}")
    format: str
    known: Unsaid[Sequence[str]]


class FormatInvalid(TargetError, reason="EXECUTABLE_FORMAT_INVALID"):
    """An installed entry point that does not give the format that it names."""

    message = "executable format {format}: entry point {entry_point} {detail}"
    format: str
    entry_point: str
    detail: str
