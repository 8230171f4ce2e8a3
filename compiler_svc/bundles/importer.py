"""Imports bundles from other layouts on this host."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sqlalchemy.orm import Session

from bundle.errors import LayoutInvalid
from bundle.reference import Reference, is_new_alias, is_new_name
from bundle.store.catalog import find_bundle
from bundle.store.layout import Layout
from bundle.store.oci import SOURCE
from bundle.store.transfer import Transfer, copy_bundle
from bundle.store.verification import BlobVerifier
from compiler_svc.bundles.errors import PathOutsideImportRoots, SourceLayoutInvalid
from compiler_svc.bundles.store import BundleStore, NamedBundle
from compiler_svc.database import versions
from compiler_svc.database.names import UNOWNED, Publisher
from compiler_svc.database.versions import Version
from compiler_svc.errors import AliasInvalid, NameInvalid


@dataclass(frozen=True, slots=True)
class ImportOrder:
    """A bundle to import and the names that it gets; a new name belongs to the publisher. `source_ref` is a digest or
    tag in the layout; empty if the layout holds one bundle.
    """

    layout: str
    source_ref: str
    name: str
    alias: str | None
    alias_etag: str | None
    publisher: Publisher = UNOWNED


@dataclass(frozen=True, slots=True)
class ImportProgress:
    """The progress of an import."""

    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class ImportedBundle:
    """The result of an import."""

    named: NamedBundle
    transfer: Transfer
    #: See `versions.MovedAlias`.
    warnings: tuple[str, ...]


class BundleImporter:
    """Imports bundles into the service's store."""

    def __init__(self, store: BundleStore, *, roots: tuple[Path, ...], verifier: BlobVerifier) -> None:
        """Imports from layouts below the roots, after symbolic links are followed; without roots, refuses imports."""
        self._store = store
        self._roots = tuple(root.resolve() for root in roots)
        self._verifier = verifier

    async def run(self, order: ImportOrder) -> AsyncGenerator[ImportProgress | ImportedBundle, None]:
        """Copies a bundle, names it, and points the alias at it in the same transaction; yields the result last.

        Closing the generator ends the copy. The next import reuses the blobs that were copied.
        """
        if not is_new_name(order.name):
            raise NameInvalid(order.name)
        if order.alias is not None:
            if not is_new_alias(order.alias):
                raise AliasInvalid(order.alias)
            # Checks before bytes move; the transaction that sets the alias checks again.
            await self._store.check_alias(order.name, order.alias, order.alias_etag)
        source, digest, made_from = await asyncio.to_thread(self._find_source, order)
        with self._store.layout.pinning() as target:
            target.pin(digest)
            copying = _Copying(partial(copy_bundle, source, target, digest, verifier=self._verifier))
            try:
                async for progress in copying.run():
                    yield progress
            finally:
                await copying.stop()
            record = partial(_set_alias, order)
            version, warnings = await self._store.name_bundle(
                order.name, digest, record, source=made_from, publisher=order.publisher
            )
        yield ImportedBundle(NamedBundle(await self._store.open(digest), version), copying.transfer, warnings)

    def _find_source(self, order: ImportOrder) -> tuple[Layout, str, str | None]:
        """Finds layout and digest of the bundle, and what it was made from if an entry of the index says so."""
        try:
            root = Path(order.layout).resolve()
        except (ValueError, OSError, RuntimeError) as error:  # a NUL; a name too long; a link that leads to itself
            raise SourceLayoutInvalid(order.layout, "no path") from error
        # The directory of blobs may itself be a symbolic link.
        for path in (root, (root / "blobs" / "sha256").resolve()):
            if not order.layout or not any(path.is_relative_to(allowed) for allowed in self._roots):
                raise PathOutsideImportRoots(order.layout)
        try:
            source = Layout(root)
            digest = find_bundle(source, order.source_ref)
            entries = [entry for entry in source.read_index().manifests if entry.digest == digest]
            made_from = (value for entry in entries if (value := (entry.annotations or {}).get(SOURCE)))
            return source, digest, next(made_from, None)
        except LayoutInvalid as error:
            raise SourceLayoutInvalid(order.layout, error.metadata["detail"]) from error


class _Copying:
    """A copy in a thread, with its newest progress; a slow reader misses older progress."""

    def __init__(self, copy: partial[Transfer]) -> None:
        self._copy = copy
        self._stopped = threading.Event()
        self._changed = asyncio.Event()
        self._newest: ImportProgress | None = None
        self._task: asyncio.Task[Transfer] | None = None

    @property
    def transfer(self) -> Transfer:
        assert self._task is not None
        return self._task.result()

    async def run(self) -> AsyncGenerator[ImportProgress, None]:
        loop = asyncio.get_running_loop()

        def report(done_bytes: int, total_bytes: int) -> None:
            if self._stopped.is_set():
                raise InterruptedError
            loop.call_soon_threadsafe(self._tell, ImportProgress(done_bytes, total_bytes))

        task = self._task = asyncio.create_task(asyncio.to_thread(self._copy, progress=report))
        task.add_done_callback(lambda _: self._changed.set())
        while not task.done():
            await self._changed.wait()
            self._changed.clear()
            newest, self._newest = self._newest, None
            if newest is not None:
                yield newest
        await task

    async def stop(self) -> None:
        """Ends the copy; returns when its thread has ended."""
        self._stopped.set()
        if self._task is not None:
            await asyncio.wait([self._task])

    def _tell(self, progress: ImportProgress) -> None:
        self._newest = progress
        self._changed.set()


def _set_alias(order: ImportOrder, session: Session, version: Version) -> tuple[Version, tuple[str, ...]]:
    reference = Reference(name=version.name, version=version.version)
    if order.alias is None:
        return versions.find_version(session, reference), ()
    moved = versions.set_alias(session, reference=reference, alias=order.alias, etag=order.alias_etag)
    session.flush()
    return versions.find_version(session, reference), moved.warnings
