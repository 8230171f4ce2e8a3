"""What a build process is told, and what it tells back. Files of a job directory:

job.json        the job, written before the process starts
result.json     the outcome, written by atomic rename at the end
lock            held by the process as long as it lives
work/           scratch space of this attempt at the build
lowered/        executables that are finished; outlives the attempt
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from compiler_svc.database.actuals import BuildFacts
from compiler_svc.database.cache import CachedExecutable
from compiler_svc.planning.job_spec import JobSpec, read_path
from compiler_svc.records import ExecutableResult
from execution.failure import Failure


class BuildEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """What every build of a service shares.

    Attributes:
        store: OCI layout that bundles are published in.
        database_url: Where the action cache is looked up.
        lowering_cache: Cache directory of the code generator, shared by all lowerings.
        num_lowerings: Lowerings of one build that run at once.
        lowering_timeout_s: Of one lowering.
        lowering_memory_bytes: Of each process of one lowering.
    """

    store: Path
    database_url: str
    lowering_cache: Path
    num_lowerings: int
    lowering_timeout_s: float
    lowering_memory_bytes: int


class BuildJob(msgspec.Struct, frozen=True, kw_only=True):
    """One build.

    Attributes:
        build_id: Equal for all attempts at the same build, and for nothing else; a file name.
        checkpoint_digest: Digest of the weights, the configuration and the tokenizer.
        graphs_of: Digest of the bundle that the specification gave, to be given its graphs; None builds a bundle.
    """

    build_id: str
    spec: JobSpec
    checkpoint_digest: str
    environment: BuildEnvironment
    graphs_of: str | None = None


class BuildResult(msgspec.Struct, frozen=True, kw_only=True):
    """A published bundle.

    Attributes:
        new_executables: What was lowered, by action digest: entries for the cache.
        facts: What later plans are told; None for weights alone, and for a bundle that was there already.
        warnings: Notes that only building brings to light.
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
    """A result or an error."""

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

    def begin(self, job: BuildJob) -> None:
        """Makes the directory ready for an attempt; of a former one, finished executables stay.

        The job is readable by its owner only: a database's URL may hold a password.
        """
        self.lowered.mkdir(parents=True, exist_ok=True)
        self._outcome.unlink(missing_ok=True)
        self._job.touch(mode=0o600)
        self._job.write_bytes(msgspec.json.encode(job, enc_hook=str))

    @contextmanager
    def working(self) -> Iterator[None]:
        """Gives a process the scratch space, empty, for itself: the process of a killed compiler may be dying still."""
        fd = os.open(self._path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            self.end()
            self.work.mkdir()
            yield
        finally:
            os.close(fd)

    def end(self) -> None:
        """Removes what only the attempt needed."""
        shutil.rmtree(self.work, ignore_errors=True)

    def remove(self) -> None:
        """Removes everything."""
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
        """Reads the outcome; None where the process ended without one."""
        if not self._outcome.exists():
            return None
        return msgspec.json.decode(self._outcome.read_bytes(), type=BuildOutcome)
