"""What a build process is told, and what it tells back. Files of a job directory:

job.json        the job, written before the process starts
result.json     the outcome, written by atomic rename at the end
work/           scratch space of the build
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from compiler_svc.database.cache import CachedExecutable
from compiler_svc.records import ExecutableResult
from compiler_svc.spec import CompileSpec
from execution.failure import Failure


class BuildEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """What every build of a service shares.

    Attributes:
        store: OCI layout that bundles are published in.
        database_url: Where the action cache is looked up.
        lowering_cache: Cache directory of the code generator, shared by all lowerings.
        num_lowerings: Lowerings of one build that run at once.
        lowering_timeout_s: Of one lowering.
    """

    store: Path
    database_url: str
    lowering_cache: Path
    num_lowerings: int
    lowering_timeout_s: float


class BuildJob(msgspec.Struct, frozen=True, kw_only=True):
    """One build.

    Attributes:
        checkpoint_digest: Digest of the weights, the configuration and the tokenizer.
    """

    spec: CompileSpec
    checkpoint_digest: str
    environment: BuildEnvironment


class BuildResult(msgspec.Struct, frozen=True, kw_only=True):
    """A published bundle.

    Attributes:
        new_executables: What was lowered, by action digest: entries for the cache.
    """

    bundle_digest: str
    executables: tuple[ExecutableResult, ...]
    new_executables: dict[str, CachedExecutable]


class BuildOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """A result or an error."""

    result: BuildResult | None = None
    error: Failure | None = None


class JobDirectory:
    """The files of one build."""

    def __init__(self, path: Path) -> None:
        """Takes an existing directory."""
        self._job = path / "job.json"
        self._outcome = path / "result.json"
        self.work = path / "work"

    def write_job(self, job: BuildJob) -> None:
        """Writes the job, readable by its owner only: a database's URL may hold a password."""
        self.work.mkdir()
        self._job.touch(mode=0o600)
        self._job.write_bytes(msgspec.json.encode(job, enc_hook=str))

    def read_job(self) -> BuildJob:
        """Reads the job."""
        return msgspec.json.decode(self._job.read_bytes(), type=BuildJob, dec_hook=_read_path)

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


def _read_path(kind: type, text: str) -> Path:
    assert kind is Path, kind
    return Path(text)
