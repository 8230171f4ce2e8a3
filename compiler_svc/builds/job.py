"""The job of a build process, and its outcome. Files of a job directory:

job.json        the job, written before the process starts
result.json     the outcome, written by atomic rename at the end
lock            held by the process as long as it lives
work/           scratch space of this attempt at the build
lowered/        finished executables; outlives the attempt
sharded/        records of finished shards; outlives the attempt
aside/          a layout of the shards that only the golden check needs; outlives the attempt unless it has an outcome
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from compiler_svc.builds.finished_shards import FOLDER as SHARDED
from compiler_svc.database.actuals import BuildFacts
from compiler_svc.database.cache import CachedExecutable
from compiler_svc.planning.job_spec import JobSpec, read_path
from compiler_svc.records import ExecutableResult
from execution.failure import Failure

#: Exit code of a build process that found no room for its outcome.
NO_ROOM_EXIT_CODE: Final = os.EX_TEMPFAIL


class BuildEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that all builds of a service share.

    Attributes:
        store: OCI layout that bundles are published in.
        database_url: SQLAlchemy URL of the database with the action cache.
        lowering_cache: Cache directory of the code generator, shared by all lowerings.
        num_lowerings: Number of lowerings of one build that run at once.
        lowering_timeout_s: Time limit of one lowering.
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


class BuildResult(msgspec.Struct, frozen=True, kw_only=True):
    """A published bundle.

    Attributes:
        new_executables: Entries for the action cache, by action digest: the executables that the build lowered.
        facts: Facts for later plans; None for weights alone, and for a bundle that the store already had.
        warnings: Warnings that only a build can find.
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


class BuildOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a build: a result or an error."""

    result: BuildResult | None = None
    error: Failure | None = None


class JobDirectory:
    """The files of one build."""

    def __init__(self, path: Path) -> None:
        """Takes the directory's path."""
        self._path = path
        self._job = path / "job.json"
        self._outcome = path / "result.json"
        self.work = path / "work"
        self.lowered = path / "lowered"
        self.sharded = path / SHARDED
        self.aside = path / "aside"

    def begin(self, job: BuildJob) -> None:
        """Prepares the directory for an attempt. Keeps executables and shards that a former attempt finished.

        Only the owner may read the job, because a database's URL may hold a password.
        """
        for kept in (self.lowered, self.sharded):
            kept.mkdir(parents=True, exist_ok=True)
        self._outcome.unlink(missing_ok=True)
        self._job.touch(mode=0o600)
        self._job.write_bytes(msgspec.json.encode(job, enc_hook=str))

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
        """Removes everything large, once the build has come to an outcome: no other attempt follows."""
        self.end()
        shutil.rmtree(self.aside, ignore_errors=True)

    def remove(self) -> None:
        """Removes the directory with all of its files."""
        shutil.rmtree(self._path, ignore_errors=True)

    def read_job(self) -> BuildJob:
        """Reads the job."""
        return msgspec.json.decode(self._job.read_bytes(), type=BuildJob, dec_hook=read_path)

    def write_outcome(self, outcome: BuildOutcome) -> None:
        """Writes the outcome, whole or not at all."""
        unfinished = self._outcome.with_suffix(".new")
        unfinished.write_bytes(msgspec.json.encode(outcome))
        unfinished.replace(self._outcome)

    def read_outcome(self) -> BuildOutcome | None:
        """Reads the outcome; None if the process ended without one."""
        if not self._outcome.exists():
            return None
        return msgspec.json.decode(self._outcome.read_bytes(), type=BuildOutcome)
