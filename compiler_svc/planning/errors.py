"""Errors of planning, which runs in processes of its own.

CompilerError
├── PlanTimedOut          a plan that took too long
├── PlanMemoryExceeded    a plan that reached its memory limit
├── PlanFailed            planning that met an error of ours, or whose process ended without an answer
└── TooManyPlans          more plans than may wait
"""

from __future__ import annotations

from compiler_svc.errors import CompilerError


class PlanTimedOut(CompilerError):
    """A plan that took too long."""

    reason = "PLAN_TIMED_OUT"

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"planning took more than {limit_s:g} s, which is its limit", limit_s=limit_s)


class PlanMemoryExceeded(CompilerError):
    """A plan that reached its memory limit."""

    reason = "PLAN_MEMORY_EXCEEDED"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"planning took more than {limit_bytes} bytes, which is its limit", limit_bytes=limit_bytes)


class PlanFailed(CompilerError):
    """Planning that met an error of ours, or whose process ended without an answer."""

    reason = "PLAN_FAILED"

    def __init__(self, detail: str) -> None:
        super().__init__(f"planning failed: {detail}", detail=detail)


class TooManyPlans(CompilerError):
    """More plans than may wait."""

    reason = "TOO_MANY_PLANS"

    def __init__(self, limit: int, retry_after_s: float) -> None:
        super().__init__(f"{limit} plans are waiting already", retry_after_s=retry_after_s, limit=limit)
