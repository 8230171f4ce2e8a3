"""The local bundles of a runtime: in mounted directories, a shared store, or fetched into the runtime's own cache."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from bundle.errors import BlobCorrupt, BundleNotFound, ManifestInvalid
from bundle.reference import parse_reference
from bundle.store.layout import Layout
from bundle.store.oci import BlobDescriptor
from bundle.store.reader import Bundle, open_bundle
from bundle.store.verification import BlobVerifier
from bundle.store.writer import register_bundle
from runtime_svc.bundles.directory import BundleDirectory
from runtime_svc.bundles.private_files import PrivateFiles
from runtime_svc.bundles.source import BundleSource, ResolvedBundle

#: Called with done and total bytes.
ByteProgress = Callable[[int, int], None]


class BundleLibrary:
    """Resolves references and makes bundles local. A layout holds a bundle whole, or does not hold it."""

    def __init__(
        self,
        source: BundleSource | None,
        *,
        directories: Sequence[BundleDirectory] = (),
        store_root: Path | None,
        cache: Layout,
        verifier: BlobVerifier,
    ) -> None:
        """Joins a source with the local layouts.

        Args:
            source: Resolves references that no directory knows, and sends missing blobs; None for no such source.
            directories: Layouts and unpacked bundles that others fill; the first one that knows a reference decides.
                Only read.
            store_root: The bundle service's own layout if it is on this host; only read. It may not exist so far.
            cache: Layout for fetched blobs and private copies; only this runtime writes it.
        """
        self._source = source
        self._directories = tuple(directories)
        self._store_root = store_root
        self._cache = cache
        self._verifier = verifier

    async def resolve(self, ref: str) -> ResolvedBundle:
        """Resolves a reference; asks no bundle service for the digest of a local bundle, or what a directory knows."""
        local = await asyncio.to_thread(self._resolve_local, ref)
        if local is not None:
            return local
        if self._source is None:
            raise BundleNotFound(ref, "no directory of bundles has it, and the runtime has no compiler to ask")
        return await self._source.resolve(ref)

    async def fetch(self, resolved: ResolvedBundle, progress: ByteProgress) -> Bundle:
        """Opens a bundle that a local layout holds; otherwise fetches its missing blobs into the cache first."""
        bundle = await asyncio.to_thread(self._open_local, resolved.digest)
        if bundle is None:
            if self._source is None:
                raise BundleNotFound(resolved.digest, "it has gone from the directories of bundles")
            await self._fetch_blobs(self._source, resolved.blobs, progress)
            await asyncio.to_thread(register_bundle, self._cache, resolved.digest)
            bundle = await asyncio.to_thread(open_bundle, self._cache, resolved.digest)
        if bundle.manifest != resolved.manifest:
            raise ManifestInvalid("the bundle service described another one", resolved.digest)
        return dataclasses.replace(bundle, layout=PrivateFiles(bundle.layout, self._cache, self._verifier))

    async def verify(self, bundle: Bundle, progress: ByteProgress | None = None) -> None:
        """Verifies every blob of a bundle, in a thread, and copies those that other users may change."""
        loop = asyncio.get_running_loop()
        done_bytes = 0

        def advance(count: int) -> None:
            nonlocal done_bytes
            done_bytes += count
            if progress is not None:
                loop.call_soon_threadsafe(progress, done_bytes, bundle.size_bytes)

        await asyncio.to_thread(self._secure, bundle)
        await asyncio.to_thread(bundle.verify, self._verifier, advance)

    @staticmethod
    def _secure(bundle: Bundle) -> None:
        assert isinstance(bundle.layout, PrivateFiles), "a bundle that `fetch` returned"
        for blob in {blob.digest: blob for blob in bundle.blobs}.values():
            bundle.layout.secure(blob)

    def _resolve_local(self, ref: str) -> ResolvedBundle | None:
        reference = parse_reference(ref)
        digest, version = reference.digest, ""
        if digest is None:
            found = (directory.find(reference) for directory in self._directories)
            digest, version = next(filter(None, found), (None, ""))
        bundle = None if digest is None else self._open_local(digest)
        return None if bundle is None else ResolvedBundle(ref, bundle.digest, bundle.manifest, bundle.blobs, version)

    def _open_local(self, digest: str) -> Bundle | None:
        for directory in self._directories:
            with suppress(BundleNotFound):
                return directory.open(digest, self._verifier)
        for layout in self._layouts():
            with suppress(BundleNotFound):
                return open_bundle(layout, digest)
        return None

    def _layouts(self) -> Iterator[Layout]:
        if self._store_root is not None and (self._store_root / "oci-layout").exists():
            yield Layout(self._store_root)
        yield self._cache

    async def _fetch_blobs(
        self, source: BundleSource, blobs: tuple[BlobDescriptor, ...], progress: ByteProgress
    ) -> None:
        unique = {blob.digest: blob for blob in blobs}
        total_bytes = sum(blob.size_bytes for blob in unique.values())
        done_bytes = 0
        for blob in unique.values():
            progress(done_bytes, total_bytes)
            if not self._cache.has(blob.digest):
                async for size_bytes in self._fetch_blob(source, blob):
                    progress(done_bytes + size_bytes, total_bytes)
            done_bytes += blob.size_bytes
        progress(done_bytes, total_bytes)

    async def _fetch_blob(self, source: BundleSource, blob: BlobDescriptor) -> AsyncIterator[int]:
        """Fetches a blob into the cache; yields the number of bytes received so far."""
        size_bytes = 0
        with self._cache.new_blob(expected_digest=blob.digest) as writer:
            async for data in source.read_blob(blob.digest):
                size_bytes += len(data)
                # A source that never stops must not fill the disk.
                if size_bytes > blob.size_bytes:
                    raise BlobCorrupt(blob.digest, f"more than the {blob.size_bytes} bytes announced", blob.title)
                await asyncio.to_thread(writer.write, data)
                yield size_bytes
            await asyncio.to_thread(writer.commit)
        await asyncio.to_thread(self._verifier.remember, self._cache.blob_path(blob.digest), blob.digest)
