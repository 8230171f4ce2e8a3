"""Errors of lowering."""

from __future__ import annotations

from collections.abc import Sequence
from signal import Signals
from typing import Final

from bundle.errors import FieldViolation, KilnError, Unsaid

# A status travels in HTTP/2 headers, of which peers accept some 8 KiB.
_MAX_FINDINGS: Final = 8
_MAX_TAIL_CHARS: Final = 2000


class LoweringError(KilnError, code="INTERNAL", reason="LOWERING_FAILED"):
    """Root of the errors of lowering."""


class ProgramUnsupported(LoweringError):
    """A graph that breaks the convention, or holds data that no weight set has."""

    message = "the graph cannot be lowered: {subject} {detail}"
    subject: str
    detail: str


class LoweringFailed(LoweringError):
    """A lowering process that ended without an executable. The compiler's log has what the process wrote last."""

    message = "lowering of {tag} ended with {how}; the compiler's log says more"
    tag: str
    how: str


class LoweringMemoryExceeded(LoweringError, code="RESOURCE_EXHAUSTED"):
    """A lowering process that ended at its memory limit."""

    message = "lowering of {tag} needs more memory than the {limit_bytes} bytes that each of its processes may take"
    tag: str
    limit_bytes: int


class LoweringTimedOut(LoweringError, code="DEADLINE_EXCEEDED"):
    """A lowering process that took too long."""

    message = "lowering of {tag} took longer than {timeout_s:g} s"
    tag: str
    timeout_s: float


class FrontEndNotServed(LoweringError, reason="NEURON_FRONT_END_NOT_SERVED"):
    """A front end for Neuron that has a name and no code yet."""

    violation = FieldViolation("neuron-front-end", "{front_end!r}", "{accepted}")
    front_end: str
    accepted: Unsaid[Sequence[str]]


class NeuronTraceFailed(LoweringError):
    """A submodel that Neuron's packages cannot trace."""

    def __init__(self, tag: str, cause: str, advice: str) -> None:
        because = f"; {advice}" if advice else ""
        super().__init__(f"{tag} cannot be traced for Neuron: {cause}{because}", tag=tag, cause=cause)


class NeuronGraphRefused(LoweringError, code="FAILED_PRECONDITION"):
    """A graph that neuronx-cc would refuse, so that it was not called."""

    def __init__(self, tag: str, findings: Sequence[str], codes: Sequence[str]) -> None:
        more = f" (and {len(findings) - _MAX_FINDINGS} more)" if len(findings) > _MAX_FINDINGS else ""
        listed = "; ".join(findings[:_MAX_FINDINGS]) + more
        super().__init__(f"Neuron's compiler would refuse {tag}: {listed}", tag=tag, codes=", ".join(codes))


class NeuronCompilerFailed(LoweringError):
    """A graph that neuronx-cc did not compile, or would not. The message ends with the compiler's log.

    Attributes:
        cause: The exit code or signal that it ended with; empty if none is known.
        peak_bytes: The most memory that one of its processes had; 0 if it had none.
    """

    def __init__(self, tag: str, codes: Sequence[str], tail: str, cause: str = "", peak_bytes: int = 0) -> None:
        named = f" with {', '.join(codes)}" if codes else ""
        facts = [cause] if cause else []
        if cause == Signals.SIGKILL.name:
            facts.append("the kernel ends processes so when a host lacks memory")
        if peak_bytes:
            facts.append(f"its largest process had {peak_bytes >> 20} MiB")
        ended = f" ({'; '.join(facts)})" if facts else ""
        super().__init__(
            f"neuronx-cc failed on {tag}{named}{ended}:\n{tail[-_MAX_TAIL_CHARS:]}",
            tag=tag,
            codes=", ".join(codes),
            cause=cause,
            peak_bytes=peak_bytes,
        )


class NeuronMemoryExceeded(NeuronCompilerFailed, code="RESOURCE_EXHAUSTED"):
    """An executable that a core has no memory for, with its weights and state."""


class XlaRunFailed(LoweringError, reason="NEURON_XLA_RUN_FAILED"):
    """A submodel that XLA did not run on the CPU, in place of its NEFF. The compiler's log has what XLA wrote last."""

    message = "XLA did not run {tag} on the CPU, for the golden check: {how}; the compiler's log says more"
    tag: str
    how: str


def may_hide_memory_limit(error: KilnError) -> bool:
    """Whether Neuron's packages failed without a code of neuronx-cc, as they do when they reach a limit of the host."""
    return isinstance(error, NeuronTraceFailed | NeuronCompilerFailed) and not error.metadata.get("codes")
