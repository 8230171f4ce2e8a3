"""Records that travel: between the build process, the database and the wire. Plain, frozen, JSON both ways."""

from __future__ import annotations

from enum import StrEnum

import msgspec


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
