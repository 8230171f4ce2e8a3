"""The job of a build process, and its result. Files of a job directory:

lock            held by the process as long as it lives
work/           scratch space of this attempt at the build
lowered/        finished executables; outlives the attempt
sharded/        records of finished shards; outlives the attempt
aside/          a layout of the shards that only the golden check needs; outlives the attempt unless it has an answer
outside         path of the unfinished checkpoint, which is beside its place, and outlives the attempt as `aside` does
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from compiler_svc.builds.finished_shards import FOLDER as SHARDED
from compiler_svc.database.actuals import BuildFacts
from compiler_svc.database.cache import CachedExecutable
from compiler_svc.planning.job_spec import JobSpec
from compiler_svc.records import ExecutableResult


class BuildEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that all builds of a service share.

    Attributes:
        lowering_cache: Cache directory of the code generator, shared by all lowerings.
        num_lowerings: Number of lowerings of one build that run at once.
        lowering_memory_bytes: Memory limit of each process of one lowering.
        checks_on_cores: Whether golden checks of executables for a device may take cores of this host.
    """

    store: Path
    database_url: str
    lowering_cache: Path
    num_lowerings: int
    lowering_timeout_s: float
    lowering_memory_bytes: int
    checks_on_cores: bool = True


class BuildJob(msgspec.Struct, frozen=True, kw_only=True):
    """One build.

    Attributes:
        build_id: Equal for all attempts at the same build, different for different builds; a file name.
        checkpoint_digest: Digest of the weights, the configuration and the tokenizer.
        graphs_of: Digest of the bundle that this job attaches graphs to; None to build a bundle.
    """

    build_id: str
    spec: JobSpec
    checkpoint_digest: str
    environment: BuildEnvironment
    graphs_of: str | None = None


class BuildResult(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A published bundle.

    `new_executables` are entries for the action cache, by action digest: the executables that the build lowered.
    `facts` are for later plans; None for weights alone, and for a bundle that the store already had. Only a build can
    find the warnings.
    """

    bundle_digest: str
    executables: tuple[ExecutableResult, ...]
    new_executables: dict[str, CachedExecutable]
    facts: BuildFacts | None = None
    warnings: tuple[str, ...] = ()

    @property
    def is_reused(self) -> bool:
        """Whether there were executables, and all of them came from the cache."""
        return bool(self.executables) and all(executable.cached for executable in self.executables)


class CheckpointWritten(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A quantized checkpoint in its place; the bytes of its tensors. Only a build can find the warnings."""

    size_bytes: int
    warnings: tuple[str, ...] = ()


JobResult = BuildResult | CheckpointWritten


class JobAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a build process leaves."""

    result: JobResult


class JobDirectory:
    """The files of one build."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.work = path / "work"
        self.lowered = path / "lowered"
        self.sharded = path / SHARDED
        self.aside = path / "aside"
        self._outside = path / "outside"

    def begin(self) -> None:
        """Prepares the directory for an attempt. Keeps executables and shards that a former attempt finished."""
        for kept in (self.lowered, self.sharded):
            kept.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Holds the empty scratch space for one process. Waits until a killed compiler's process has released it."""
        fd = os.open(self._path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            self.end()
            self.work.mkdir()
            yield
        finally:
            os.close(fd)

    def end(self) -> None:
        """Removes the files that only the attempt needed."""
        shutil.rmtree(self.work, ignore_errors=True)

    def free(self) -> None:
        """Removes everything large, once the build has left its answer: no other attempt follows."""
        self.end()
        shutil.rmtree(self.aside, ignore_errors=True)
        self._remove_outside()

    def remove(self) -> None:
        """Removes the directory with all of its files."""
        self._remove_outside()
        shutil.rmtree(self._path, ignore_errors=True)

    def begin_outside(self, path: Path) -> None:
        """Makes a directory elsewhere that belongs to this one, unless an earlier attempt has made it."""
        self._outside.write_bytes(os.fsencode(path))
        path.mkdir(exist_ok=True)

    def _remove_outside(self) -> None:
        with suppress(FileNotFoundError):
            shutil.rmtree(os.fsdecode(self._outside.read_bytes()), ignore_errors=True)
