"""The records that pass between the build process, the database and the wire: plain, frozen, encoded as JSON."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Literal

import msgspec

#: What computed the numbers that a golden check compares: the bundle's executables, or XLA on the compiler's CPU from
#: the submodels that they are made of.
GoldenMethod = Literal["executables", "xla_cpu"]
#: Media type of the record that a golden check leaves beside a bundle; no record, no check.
GOLDEN_TYPE: Final = "application/vnd.kiln.golden.v1+json"


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    def to_json(self) -> bytes:
        return msgspec.json.encode(self)


class Stage(StrEnum):
    """The stage of a compile."""

    QUEUED = "queued"
    CACHE_CHECK = "cache_check"
    TRACE = "trace"
    LOWER = "lower"
    SHARD = "shard"
    VERIFY = "verify"
    PUBLISH = "publish"
    DONE = "done"


class Progress(_Record, frozen=True):
    """The progress of a compile.

    Attributes:
        executables_total: Number of executables; 0 until known.
        executables_cached: Number of finished executables that came from the cache.
        total_bytes: Bytes of weights to shard; 0 until known.
        eta_s: Estimated seconds to the end; None while unknown.
    """

    stage: Stage
    executables_done: int = 0
    executables_total: int = 0
    executables_cached: int = 0
    sharded_bytes: int = 0
    total_bytes: int = 0
    eta_s: float | None = None
    message: str = ""


class BuildPart(_Record, frozen=True):
    """A part of a build that is over, for the trace of its compile: what was done, such as `lower
    token_generation_512`, and when it began, in nanoseconds since 1970.
    """

    name: str
    start_ns: int
    duration_s: float


class BuildNews(_Record, frozen=True):
    """What a build process tells the service, one packet at a time: progress, or a part that is over."""

    progress: Progress | None = None
    part: BuildPart | None = None


class ExecutableResult(_Record, frozen=True):
    """One executable of a built bundle, with its lowering time; None if the executable came from the cache."""

    tag: str
    submodel: str
    bucket: tuple[int, ...]
    cached: bool
    duration_s: float | None
    size_bytes: int


class CheckpointResult(_Record, frozen=True):
    """The result of a QuantizeWeights: a checkpoint, by its path on the compiler's host."""

    model: str
    size_bytes: int
    warnings: tuple[str, ...]
    duration_s: float


class CompileResult(_Record, frozen=True):
    """The result of a compile. It is `cached` if the cache had everything, so that no lowering ran; its duration is
    from acceptance to the end.
    """

    name: str
    version: int
    digest: str
    cached: bool
    executables: tuple[ExecutableResult, ...]
    warnings: tuple[str, ...]
    duration_s: float


#: What an operation ends with if it ends well.
OperationResult = CompileResult | CheckpointResult


def read_result(data: bytes) -> OperationResult:
    """Reads the result of an operation. Bundles have digests."""
    fields = msgspec.json.decode(data)
    if "digest" in fields:
        return msgspec.convert(fields, CompileResult)
    return msgspec.convert(fields, CheckpointResult)
