"""Records that travel: between the build process, the database and the wire. Plain, frozen, JSON both ways."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from bundle.errors import FieldViolation, KilnError


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Immutable, strict record."""

    def to_json(self) -> bytes:
        """The record as JSON."""
        return msgspec.json.encode(self)


class Stage(StrEnum):
    """Where a compile stands."""

    QUEUED = "queued"
    CACHE_CHECK = "cache_check"
    TRACE = "trace"
    LOWER = "lower"
    SHARD = "shard"
    VERIFY = "verify"
    PUBLISH = "publish"
    DONE = "done"


class Progress(_Record, frozen=True):
    """How far a compile is.

    Attributes:
        executables_total: 0 until known.
        executables_cached: Of the finished executables, how many came from the cache.
        total_bytes: Bytes of weights to shard; 0 until known.
        eta_s: Estimated seconds to the end, None while unknown.
        message: One line for a person.
    """

    stage: Stage
    executables_done: int = 0
    executables_total: int = 0
    executables_cached: int = 0
    sharded_bytes: int = 0
    total_bytes: int = 0
    eta_s: float | None = None
    message: str = ""


class ExecutableResult(_Record, frozen=True):
    """One executable of a built bundle.

    Attributes:
        duration_s: Lowering time, None where it came from the cache.
    """

    tag: str
    submodel: str
    bucket: tuple[int, ...]
    cached: bool
    duration_s: float | None
    size_bytes: int


class CompileResult(_Record, frozen=True):
    """What a compile returns.

    Attributes:
        cached: Nothing had to be compiled.
        warnings: Notes on the configuration.
        duration_s: Time from acceptance to the end.
    """

    name: str
    version: int
    digest: str
    cached: bool
    executables: tuple[ExecutableResult, ...]
    warnings: tuple[str, ...]
    duration_s: float


class ErrorRecord(_Record, frozen=True):
    """A named error at rest: what its class and attributes say, without the class.

    Attributes:
        violations: (field, value, accepted) of each mistake.
    """

    reason: str
    message: str
    metadata: dict[str, str]
    violations: tuple[tuple[str, str, str], ...]
    retry_after_s: float | None


def record_error(error: KilnError) -> ErrorRecord:
    """Puts a named error to rest."""
    return ErrorRecord(
        reason=error.reason,
        message=str(error),
        metadata=error.metadata,
        violations=tuple((violation.field, violation.value, violation.accepted) for violation in error.violations),
        retry_after_s=error.retry_after_s,
    )


class RecordedError(KilnError):
    """A named error that was at rest. Its reason is the recorded one."""

    reason = "INTERNAL"

    def __init__(self, record: ErrorRecord) -> None:
        metadata: dict[str, Any] = record.metadata
        super().__init__(
            record.message,
            violations=tuple(FieldViolation(*violation) for violation in record.violations),
            retry_after_s=record.retry_after_s,
        )
        self.metadata = dict(metadata)
        self.record = record
