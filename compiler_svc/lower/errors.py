"""Errors of lowering.

KilnError
└── LoweringError
    ├── ProgramUnsupported    a graph that breaks the convention, or holds data that no weight set has
    ├── LoweringFailed        a lowering process that ended without an executable
        ├── LoweringMemoryExceeded    a lowering process that ended at its memory limit
    └── LoweringTimedOut      a lowering process that took too long
"""

from __future__ import annotations

from bundle.errors import KilnError


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
