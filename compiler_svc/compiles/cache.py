"""Finding the bundle of a compile that was done before, without a build process and without torch."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from functools import partial
from typing import Final

from sqlalchemy.orm import Session

from bundle.digest import canonical_json, sha256_bytes
from bundle.errors import BundleError
from bundle.reader import Bundle
from compiler_svc.builds.job import BuildResult
from compiler_svc.bundles.store import BundleStore
from compiler_svc.database import actuals, cache
from compiler_svc.database.engine import Database
from compiler_svc.database.file_digests import FileDigests
from compiler_svc.planning.code_digest import digest_bundle_code
from compiler_svc.planning.job_spec import JobSpec
from compiler_svc.records import ExecutableResult
from compiler_svc.weights.checkpoint import Checkpoint, compute_checkpoint_digest

_MAX_HASHING: Final = 2


@dataclass(frozen=True)
class Identity:
    """What a compile is, by digests.

    Attributes:
        checkpoint_digest: Of the checkpoint's weights and configuration.
        action_digest: Of everything that the bundle depends on; equal ones mean equal bundles.
    """

    checkpoint_digest: str
    action_digest: str


class BundleCache:
    """Bundles by what they were made of."""

    def __init__(self, database: Database, store: BundleStore) -> None:
        """Takes the index, and the store that has to hold what the index names."""
        self._database = database
        self._store = store
        self._digests = FileDigests(database)
        # Hashing must not take every thread from those who read blobs.
        self._hashing = asyncio.Semaphore(_MAX_HASHING)

    async def identify(self, spec: JobSpec) -> Identity:
        """Hashes what a compile depends on. Files that were hashed before are not read again.

        Raises:
            CheckpointNotFound, CheckpointInvalid: The checkpoint changed since it was admitted.
        """
        cancelled = threading.Event()
        async with self._hashing:
            try:
                return await asyncio.to_thread(self._identify, spec, cancelled)
            finally:
                cancelled.set()

    async def find(self, action_digest: str) -> BuildResult | None:
        """The bundle of an action, None where there is none or the store lost it."""
        digest = await self._database.run(partial(cache.find_bundle, action_digest=action_digest))
        if digest is None:
            return None
        try:
            bundle = await self._store.open(digest)
        except BundleError:
            return None
        return BuildResult(bundle_digest=digest, executables=_describe_executables(bundle), new_executables={})

    async def remember(self, action_digest: str, built: BuildResult) -> None:
        """Records what a build that succeeded has made."""

        def work(session: Session) -> None:
            cache.remember_executables(session, built.new_executables)
            cache.remember_bundle(session, action_digest, built.bundle_digest)
            if built.facts is not None:
                actuals.remember_facts(session, built.bundle_digest, built.facts)

        await self._database.run(work)

    def _identify(self, spec: JobSpec, cancelled: threading.Event) -> Identity:
        def stop_when_cancelled(_size_bytes: int) -> None:
            if cancelled.is_set():
                raise InterruptedError

        checkpoint = Checkpoint.open(spec.model, roots=spec.model_roots, read_pickles=False)
        digest_file = partial(self._digests.digest_file, progress=stop_when_cancelled)
        weights = compute_checkpoint_digest(checkpoint, digest_file)
        # The bundle holds the tokenizer and what the generation configuration says, too.
        others = [*checkpoint.tokenizer_files, spec.model / "generation_config.json"]
        inputs = {file.name: digest_file(file) for file in others if file.is_file()}
        action_digest = spec.bundle_action_digest(
            checkpoint_digest=sha256_bytes(canonical_json({"weights": weights, "files": inputs})),
            toolchain=spec.toolchain.read_versions(),
            code_digest=digest_bundle_code(),
        )
        return Identity(checkpoint_digest=weights, action_digest=action_digest)


def _describe_executables(bundle: Bundle) -> tuple[ExecutableResult, ...]:
    return tuple(
        ExecutableResult(
            tag=executable.tag,
            submodel=executable.submodel,
            bucket=executable.bucket,
            cached=True,
            duration_s=None,
            size_bytes=bundle.layout.stored(executable.blob).size_bytes,
        )
        for executable in bundle.manifest.executables
    )
