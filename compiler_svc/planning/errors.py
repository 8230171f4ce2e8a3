"""Errors of planning, which runs in processes of its own."""

from __future__ import annotations

from compiler_svc.errors import CompilerError


class PlanTimedOut(CompilerError, code="DEADLINE_EXCEEDED"):
    """A plan that took too long."""

    message = "planning took more than {limit_s:g} s, which is its limit"
    limit_s: float


class PlanMemoryExceeded(CompilerError, code="RESOURCE_EXHAUSTED"):
    """A plan that reached its memory limit."""

    message = "planning took more than {limit_bytes} bytes, which is its limit"
    limit_bytes: int


class PlanFailed(CompilerError):
    """Planning that met an error of ours, or whose process ended without an answer."""

    message = "planning failed: {detail}"
    detail: str


class TooManyPlans(CompilerError, code="RESOURCE_EXHAUSTED"):
    """More plans than may wait."""

    message = "{limit} plans are waiting already"
    limit: int
    retry_after_s: float
