"""Errors of leases and imports.

CompilerError
├── LeaseInvalid              a lease whose holder or duration is out of bounds
├── CacheAgeInvalid           an age of cached executables that no time has
├── PathOutsideImportRoots    a layout that leaves the configured roots
└── SourceLayoutInvalid       a directory to import from that is not an OCI image layout
"""

from __future__ import annotations

from bundle.errors import FieldViolation
from compiler_svc.errors import CompilerError


class LeaseInvalid(CompilerError):
    """A lease whose holder or duration is out of bounds."""

    reason = "LEASE_INVALID"

    def __init__(self, field: str, value: str, accepted: str) -> None:
        violation = FieldViolation(field, value, accepted)
        super().__init__(str(violation), violations=(violation,), field=field, value=value)


class CacheAgeInvalid(CompilerError):
    """An age of cached executables that no time has."""

    reason = "CACHE_AGE_INVALID"

    def __init__(self, age_s: float, limit_s: float) -> None:
        violation = FieldViolation("max_cache_age", f"{age_s:g} s", f"0 s to {limit_s:.0f} s")
        super().__init__(str(violation), violations=(violation,), age_s=age_s, limit_s=limit_s)


class PathOutsideImportRoots(CompilerError):
    """A layout that leaves the configured roots."""

    reason = "PATH_OUTSIDE_IMPORT_ROOTS"

    def __init__(self, path: str) -> None:
        accepted = "a directory that stays under an import root, symbolic links resolved"
        violation = FieldViolation("layout", repr(path), accepted)
        super().__init__(str(violation), violations=(violation,), path=path)


class SourceLayoutInvalid(CompilerError):
    """A directory to import from that is not an OCI image layout, or whose index is broken."""

    reason = "LAYOUT_INVALID"

    def __init__(self, path: str, detail: str) -> None:
        violation = FieldViolation("layout", repr(path), "an OCI image layout whose index is whole")
        super().__init__(f"{violation}: {detail}", violations=(violation,), path=path, detail=detail)
