"""Finds the bundle that an earlier, equal compile made, without a build process and without torch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from sqlalchemy.orm import Session

from bundle.digest import canonical_json, sha256_bytes
from bundle.errors import BundleError
from bundle.store.reader import Bundle
from compiler_svc.adapters.directory import find_files
from compiler_svc.builds.job import BuildResult
from compiler_svc.bundles.store import BundleStore
from compiler_svc.database import actuals, cache
from compiler_svc.database.engine import Database
from compiler_svc.database.file_digests import FileDigests
from compiler_svc.planning.code_digest import digest_bundle_code
from compiler_svc.planning.job_spec import AdapterJobSpec, CompileJobSpec, JobSpec, open_checkpoint
from compiler_svc.records import ExecutableResult
from compiler_svc.weights.checkpoint import compute_checkpoint_digest
from compiler_svc.weights.tokenizer_sources import find_source, has_tokenizer_file, read_converter_versions

_MAX_HASHING: Final = 2


@dataclass(frozen=True)
class Identity:
    """The digests that identify a compile. The action digest is of everything that the bundle depends on; equal ones
    mean equal bundles.
    """

    checkpoint_digest: str
    action_digest: str


class BundleCache:
    """Finds bundles by action digest."""

    def __init__(self, database: Database, store: BundleStore) -> None:
        self._database = database
        self._store = store
        self._digests = FileDigests(database)
        # Leaves threads free for streams that read blobs.
        self._hashing = asyncio.Semaphore(_MAX_HASHING)

    async def identify(self, spec: JobSpec) -> Identity:
        """Hashes everything that a compile depends on. Reuses the digests of unchanged files."""
        cancelled = threading.Event()
        async with self._hashing:
            try:
                return await asyncio.to_thread(self._identify, spec, cancelled)
            finally:
                cancelled.set()

    async def find(self, action_digest: str) -> BuildResult | None:
        """Finds the bundle of an action; None if no build made one, or if the store has lost it."""
        digest = await self._database.run(cache.find_bundle, action_digest)
        if digest is None:
            return None
        try:
            bundle = await self._store.open(digest)
        except BundleError:
            return None
        return BuildResult(bundle_digest=digest, executables=_describe_executables(bundle), new_executables={})

    async def remember(self, action_digest: str, built: BuildResult) -> None:
        """Records the results of a build that succeeded."""

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

        digest_file = partial(self._digests.digest_file, progress=stop_when_cancelled)
        digest, inputs = _digest_source(spec, digest_file)
        contents: dict[str, object] = {"weights": digest, "files": inputs}
        if isinstance(spec, CompileJobSpec) and spec.adapters:
            contents["adapters"] = {
                one.name: find_files(one.path, roots=spec.adapter_roots).digest(digest_file) for one in spec.adapters
            }
        action_digest = spec.bundle_action_digest(
            checkpoint_digest=sha256_bytes(canonical_json(contents)),
            toolchain=spec.toolchain.read_versions(),
            code_digest=digest_bundle_code(),
        )
        return Identity(checkpoint_digest=digest, action_digest=action_digest)


def _digest_source(spec: JobSpec, digest_file: Callable[[Path], str]) -> tuple[str, dict[str, str]]:
    """The digest of what a job reads, and those of the other files of which the bundle holds bytes or values."""
    if isinstance(spec, AdapterJobSpec):
        return find_files(spec.model, roots=spec.model_roots).digest(digest_file), {}
    checkpoint = open_checkpoint(spec, read_pickles=False)
    others = [*checkpoint.tokenizer_files, *(file.path for file in checkpoint.describing_files)]
    inputs = {file.name: digest_file(file) for file in others}
    inputs |= {f"{file.parent.name}/{file.name}": digest_file(file) for file in checkpoint.template_files.values()}
    if has_tokenizer_file(checkpoint) or find_source(checkpoint) is not None:
        inputs["tokenizer"] = sha256_bytes(canonical_json(read_converter_versions()))
    return compute_checkpoint_digest(checkpoint, digest_file), inputs


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
