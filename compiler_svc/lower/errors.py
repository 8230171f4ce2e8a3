"""Errors of lowering.

KilnError
└── LoweringError
    ├── ProgramUnsupported    a graph that breaks the convention, or holds data that no weight set has
    ├── LoweringFailed        a lowering process that ended without an executable
        ├── LoweringMemoryExceeded    a lowering process that ended at its memory limit
    ├── LoweringTimedOut      a lowering process that took too long
    ├── FrontEndNotServed     a front end for Neuron that has a name and no code yet
    ├── NeuronTraceFailed     a submodel that Neuron's packages cannot trace
    ├── NeuronGraphRefused    a graph that neuronx-cc would refuse
    ├── NeuronCompilerFailed  a graph that neuronx-cc did not compile
    │   └── NeuronMemoryExceeded  an executable that a core has no memory for
    └── XlaRunFailed          a submodel that XLA did not run on the CPU
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bundle.errors import FieldViolation, KilnError

# A status travels in HTTP/2 headers, of which peers accept some 8 KiB.
_MAX_FINDINGS: Final = 8
_MAX_TAIL_CHARS: Final = 2000


class LoweringError(KilnError):
    """Root of the errors of lowering."""

    reason = "LOWERING_FAILED"


class ProgramUnsupported(LoweringError):
    """A graph that breaks the convention, or holds data that no weight set has."""

    reason = "PROGRAM_UNSUPPORTED"

    def __init__(self, subject: str, detail: str) -> None:
        super().__init__(f"the graph cannot be lowered: {subject} {detail}", subject=subject, detail=detail)


class LoweringFailed(LoweringError):
    """A lowering process that ended without an executable. The compiler's log has what the process wrote last."""

    reason = "LOWERING_FAILED"

    def __init__(self, tag: str, how: str) -> None:
        super().__init__(f"lowering of {tag} ended with {how}; the compiler's log says more", tag=tag, how=how)


class LoweringMemoryExceeded(LoweringError):
    """A lowering process that ended at its memory limit."""

    reason = "LOWERING_MEMORY_EXCEEDED"

    def __init__(self, tag: str, limit_bytes: int) -> None:
        super().__init__(
            f"lowering of {tag} needs more memory than the {limit_bytes} bytes that each of its processes may take",
            tag=tag,
            limit_bytes=limit_bytes,
        )


class LoweringTimedOut(LoweringError):
    """A lowering process that took too long."""

    reason = "LOWERING_TIMED_OUT"

    def __init__(self, tag: str, timeout_s: float) -> None:
        super().__init__(f"lowering of {tag} took longer than {timeout_s:g} s", tag=tag, timeout_s=timeout_s)


class FrontEndNotServed(LoweringError):
    """A front end for Neuron that has a name and no code yet."""

    reason = "NEURON_FRONT_END_NOT_SERVED"

    def __init__(self, name: str, accepted: Sequence[str]) -> None:
        violation = FieldViolation("neuron-front-end", repr(name), ", ".join(accepted))
        super().__init__(str(violation), violations=(violation,), front_end=name)


class NeuronTraceFailed(LoweringError):
    """A submodel that Neuron's packages cannot trace."""

    reason = "NEURON_TRACE_FAILED"

    def __init__(self, tag: str, cause: str, advice: str) -> None:
        because = f"; {advice}" if advice else ""
        super().__init__(f"{tag} cannot be traced for Neuron: {cause}{because}", tag=tag, cause=cause)


class NeuronGraphRefused(LoweringError):
    """A graph that neuronx-cc would refuse, so that it was not called."""

    reason = "NEURON_GRAPH_REFUSED"

    def __init__(self, tag: str, findings: Sequence[str], codes: Sequence[str]) -> None:
        more = f" (and {len(findings) - _MAX_FINDINGS} more)" if len(findings) > _MAX_FINDINGS else ""
        listed = "; ".join(findings[:_MAX_FINDINGS]) + more
        super().__init__(f"Neuron's compiler would refuse {tag}: {listed}", tag=tag, codes=", ".join(codes))


class NeuronCompilerFailed(LoweringError):
    """A graph that neuronx-cc did not compile. The message ends with the compiler's log."""

    reason = "NEURON_COMPILER_FAILED"

    def __init__(self, tag: str, codes: Sequence[str], tail: str) -> None:
        named = f" with {', '.join(codes)}" if codes else ""
        super().__init__(
            f"neuronx-cc failed on {tag}{named}:\n{tail[-_MAX_TAIL_CHARS:]}", tag=tag, codes=", ".join(codes)
        )


class NeuronMemoryExceeded(NeuronCompilerFailed):
    """An executable that a core has no memory for, with its weights and state."""

    reason = "NEURON_MEMORY_EXCEEDED"


class XlaRunFailed(LoweringError):
    """A submodel that XLA did not run on the CPU, in place of its NEFF. The compiler's log has what XLA wrote last."""

    reason = "NEURON_XLA_RUN_FAILED"

    def __init__(self, tag: str, how: str) -> None:
        super().__init__(
            f"XLA did not run {tag} on the CPU, for the golden check: {how}; the compiler's log says more",
            tag=tag,
            how=how,
        )


def may_hide_memory_limit(error: KilnError) -> bool:
    """Whether Neuron's packages failed without a code of neuronx-cc, as they do when they reach a limit of the host."""
    return isinstance(error, NeuronTraceFailed | NeuronCompilerFailed) and not error.metadata.get("codes")
