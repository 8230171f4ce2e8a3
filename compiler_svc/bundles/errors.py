"""Errors of leases and imports."""

from __future__ import annotations

from bundle.errors import FieldViolation, Unsaid
from compiler_svc.errors import CompilerError


class LeaseInvalid(CompilerError, code="INVALID_ARGUMENT"):
    """A lease whose holder or duration is out of bounds."""

    violation = FieldViolation("{field}", "{value}", "{accepted}")
    field: str
    value: str
    accepted: Unsaid[str]


class CacheAgeInvalid(CompilerError, code="INVALID_ARGUMENT"):
    """An age of cached executables that no time has."""

    violation = FieldViolation("max_cache_age", "{age_s:g} s", "0 s to {limit_s:.0f} s")
    age_s: float
    limit_s: float


class PathOutsideImportRoots(CompilerError, code="PERMISSION_DENIED"):
    """A layout that leaves the configured roots."""

    violation = FieldViolation(
        "layout", "{path!r}", "a directory that stays under an import root, symbolic links resolved"
    )
    path: str


class SourceLayoutInvalid(CompilerError, code="INVALID_ARGUMENT", reason="LAYOUT_INVALID"):
    """A directory to import from that is not an OCI image layout, or whose index is broken."""

    message = "{violation}: {detail}"
    violation = FieldViolation("layout", "{path!r}", "an OCI image layout whose index is whole")
    path: str
    detail: str
