"""The service's bundles: keeps versions in the database and bytes in the layout consistent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import msgspec
import structlog
from sqlalchemy.orm import Session

from bundle.errors import BlobNotFound, BundleError, BundleNotFound, KilnError, RefInvalid
from bundle.reference import is_name, is_new_alias, parse_reference
from bundle.store.layout import Layout
from bundle.store.oci import BlobDescriptor
from bundle.store.reader import Bundle, open_bundle, read_small_blob
from bundle.store.referrers import list_referrer_files
from bundle.store.removal import Collected, FreedSpace, Needs, collect_garbage, remove_bundle
from bundle.store.tags import write_tags
from compiler_svc.bundles.errors import CacheAgeInvalid, LeaseInvalid
from compiler_svc.database import cache, leases, names, versions
from compiler_svc.database.engine import Database
from compiler_svc.database.leases import Lease
from compiler_svc.database.names import UNOWNED, Publisher
from compiler_svc.database.versions import Alias, Contents, PageOfVersions, Version
from compiler_svc.errors import AliasInvalid, NameInvalid, OffsetInvalid, OwnerInvalid
from compiler_svc.records import GOLDEN_TYPE, GoldenMethod
from edge.access.principal import MAX_NAME_CHARACTERS

CHUNK_SIZE_BYTES: Final = 1 << 20

MAX_HOLDER_CHARACTERS: Final = 128
LEASE_DURATION_S: Final = 24 * 3600.0
MAX_LEASE_S: Final = 30 * 24 * 3600.0

#: What protobuf's durations carry: 10 000 years.
MAX_CACHE_AGE_S: Final = 315_576_000_000.0

#: The record has all tokens of all sequences.
_MAX_GOLDEN_RECORD_BYTES: Final = 16 << 20

T = TypeVar("T")

_log = structlog.get_logger("compiler")


@dataclass(frozen=True)
class NamedBundle:
    """A bundle and the version that names it; None if a digest found the bundle and no version names it."""

    bundle: Bundle
    version: Version | None


class BundleStore:
    """Manages versions, aliases, leases and blobs."""

    def __init__(
        self, database: Database, layout: Layout, *, list_kept: Callable[[], frozenset[str]] = frozenset
    ) -> None:
        """`list_kept` lists digests of blobs that are kept for other reasons than those that the database knows."""
        self._database = database
        self._list_kept = list_kept
        self.layout = layout
        # A bundle that is being removed can get neither version nor lease.
        self._naming = asyncio.Lock()

    async def get(self, text: str) -> NamedBundle:
        """Resolves a reference."""
        reference = parse_reference(text)
        try:
            version = await self._database.run(versions.find_version, reference)
        except BundleNotFound:
            if reference.digest is None:
                raise
            version = None
        digest = reference.digest if version is None else version.digest
        assert digest is not None
        return NamedBundle(await self.open(digest), version)

    async def list_referrer_files(self, digest: str) -> Sequence[BlobDescriptor]:
        """Lists files about a bundle that are not part of it; see `bundle.store.referrers.list_referrer_files`."""
        return await asyncio.to_thread(list_referrer_files, self.layout, digest)

    async def read_golden_method(self, referrers: Sequence[BlobDescriptor]) -> GoldenMethod | None:
        """Reads what computed the numbers of a bundle's golden check; None if its referrers have no readable record."""
        record = next((one.digest for one in referrers if one.media_type == GOLDEN_TYPE), None)
        if record is None:
            return None
        return await asyncio.to_thread(_read_method, self.layout, record)

    async def open(self, digest: str) -> Bundle:
        """Opens a published bundle; see `bundle.store.reader.open_bundle`."""
        return await asyncio.to_thread(open_bundle, self.layout, digest)

    async def name_bundle(
        self,
        name: str,
        digest: str,
        record: Callable[[Session, Version], T],
        *,
        source: str | None = None,
        publisher: Publisher = UNOWNED,
    ) -> T:
        """Gives a bundle a version, and runs `record` in the same transaction, whose result is returned. `source` is
        what the bundle was made from, such as a checkpoint's path below its model root; None if unknown.
        """
        async with self._naming:
            bundle = await self.open(digest)

            def work(session: Session) -> T:
                version = versions.add_version(
                    session,
                    name=name,
                    digest=digest,
                    size_bytes=bundle.size_bytes,
                    graph_abi_digest=bundle.manifest.graph_abi_digest,
                    contents=contents_of(bundle),
                    source=source,
                    publisher=publisher,
                )
                leases.release_leases(session, holder=leases.BUILD_HOLDER, digest=digest)
                return record(session, version)

            recorded = await self._database.run(work)
        await self.write_tags()
        return recorded

    async def give_name(self, name: str, owner: str) -> str:
        """Makes a name belong to a principal; see `names.give_name`."""
        if not is_name(name):
            raise NameInvalid(name)
        if len(owner) > MAX_NAME_CHARACTERS or not owner.isprintable():
            raise OwnerInvalid(owner, MAX_NAME_CHARACTERS)
        return await self._database.run(names.give_name, name, owner)

    async def delete(self, text: str) -> FreedSpace:
        """Removes a version, and its bundle unless another version, a lease or a running build needs the bundle."""
        reference = parse_reference(text)
        if reference.version is None:
            raise RefInvalid(text, "NAME:vN")
        async with self._naming:
            version = await self._database.run(versions.delete_version, reference)
            try:
                freed = await asyncio.to_thread(remove_bundle, self.layout, version.digest, self._find_needs)
            except BundleNotFound:
                freed = FreedSpace(0, 0)
        await self.write_tags()
        return freed

    async def write_tags(self) -> None:
        """Repeats all versions and aliases as tags of the layout's index, after the database, which is the truth. Logs
        a failure instead of raising it, since what the tags repeat is done: the next call writes them all.
        """
        find_tags = partial(self._database.run_and_wait, versions.list_tags)
        try:
            await asyncio.to_thread(write_tags, self.layout, find_tags)
        except KilnError as error:
            _log.warning("tags cannot be written", error=str(error))

    async def collect_garbage(self, *, dry_run: bool = False, max_cache_age_s: float | None = None) -> Collected:
        """Removes what no version, lease, running build or cached executable needs; see `removal.collect_garbage`.

        Forgets executables that no bundle uses and no build has used for `max_cache_age_s`; None keeps all.

        Raises:
            LayoutInvalid: The store's index, or a manifest that it lists, cannot be read. The call has removed nothing.
        """
        if max_cache_age_s is not None and not 0 <= max_cache_age_s <= MAX_CACHE_AGE_S:
            raise CacheAgeInvalid(max_cache_age_s, MAX_CACHE_AGE_S)
        # No later than 1970, because a database has integers of 64 bits.
        used_since_ns = 0 if max_cache_age_s is None else max(0, time.time_ns() - round(max_cache_age_s * 1e9))
        find_needs = partial(self._find_needs, used_since_ns)
        async with self._naming:
            collected = await asyncio.to_thread(collect_garbage, self.layout, find_needs, dry_run=dry_run)
            if not dry_run:
                has_bundle = (await self._read_listed_digests()).__contains__
                await self._database.run(cache.forget_lost, has_blob=self.layout.has, has_bundle=has_bundle)
        return collected

    async def lease(self, text: str, *, holder: str, duration_s: float | None) -> Lease:
        """Leases a bundle for 1 second to 30 days, 1 day if None, or renews the lease that the holder has on it."""
        if not 1 <= len(holder) <= MAX_HOLDER_CHARACTERS:
            raise LeaseInvalid("holder", repr(holder), f"1 to {MAX_HOLDER_CHARACTERS} characters")
        if duration_s is None:
            duration_s = LEASE_DURATION_S
        if not 1 <= duration_s <= MAX_LEASE_S:
            raise LeaseInvalid("duration", f"{duration_s:g} s", f"1 s to {MAX_LEASE_S:g} s")
        async with self._naming:
            digest = (await self.get(text)).bundle.digest
            return await self._database.run(leases.set_lease, holder=holder, digest=digest, duration_s=duration_s)

    async def release_leases(self, *, holder: str, digest: str) -> int:
        """Ends a lease, or all leases of a holder if `digest` is empty; returns how many had not expired."""
        return await self._database.run(leases.release_leases, holder=holder, digest=digest)

    async def list_leases(self, digest: str) -> Sequence[Lease]:
        """Lists unexpired leases of one bundle, or of all bundles if `digest` is empty."""
        return await self._database.run(leases.list_leases, digest)

    def _find_needs(self, used_since_ns: int = 0) -> Needs:
        def work(session: Session) -> Needs:
            return Needs(
                bundles=versions.list_named_digests(session) | leases.list_leased_digests(session),
                blobs=cache.list_executable_blobs(session, used_since_ns=used_since_ns) | self._list_kept(),
            )

        return self._database.run_and_wait(work)

    async def list_versions(self, *, name: str, page_size: int, after: tuple[str, int] | None) -> PageOfVersions:
        """Lists versions by name, then newest first."""
        return await self._database.run(versions.list_versions, name=name, page_size=page_size, after=after)

    async def list_lost_versions(self) -> Sequence[str]:
        """Lists references of the versions whose bundle is missing from the store's index."""
        listed = await self._read_listed_digests()
        named = await self._database.run(versions.list_named_digests)
        return await self._database.run(versions.list_refs, named - listed)

    async def _read_listed_digests(self) -> frozenset[str]:
        """Digests of the bundles in the store's index, which may be long."""
        index = await asyncio.to_thread(self.layout.read_index)
        return frozenset(entry.digest for entry in index.manifests)

    async def set_alias(
        self, text: str, alias: str, etag: str | None, *, require_compatible: bool = False
    ) -> versions.MovedAlias:
        """Points an alias at a version; see `versions.set_alias`."""
        reference = parse_reference(text)
        if reference.digest is not None:
            raise RefInvalid(text, "NAME, NAME:vN or NAME@ALIAS")
        if not is_new_alias(alias):
            raise AliasInvalid(alias)
        written = await self._database.run(
            versions.set_alias, reference=reference, alias=alias, etag=etag, require_compatible=require_compatible
        )
        await self.write_tags()
        return written

    async def check_alias(self, name: str, alias: str, etag: str | None) -> None:
        """Checks that an alias can be set with an etag; see `versions.check_alias`."""
        await self._database.run(versions.check_alias, name, alias, etag)

    async def delete_alias(self, name: str, alias: str, etag: str | None) -> None:
        """Removes an alias; see `versions.delete_alias`."""
        await self._database.run(versions.delete_alias, name=name, alias=alias, etag=etag)
        await self.write_tags()

    async def list_aliases(self, name: str) -> Sequence[Alias]:
        """Lists aliases of one bundle name, or of all if `name` is empty, by name."""
        return await self._database.run(versions.list_aliases, name)

    async def read_blob(self, digest: str, offset_bytes: int, *, ref: str = "") -> AsyncGenerator[bytes, None]:
        """Yields the bytes of a blob from an offset on, in pieces of at most 1 MiB. `ref` is the bundle that the blob
        must be of, or about which it must be; empty for any blob.
        """
        if ref:
            bundle = (await self.get(ref)).bundle
            blobs = [*bundle.blobs, *await self.list_referrer_files(bundle.digest)]
            if all(blob.digest != digest for blob in blobs):
                raise BlobNotFound(digest)
        size_bytes = self.layout.stored(digest).size_bytes
        if not 0 <= offset_bytes <= size_bytes:
            raise OffsetInvalid(offset_bytes, size_bytes)
        with self.layout.open_blob(digest) as file:
            file.seek(offset_bytes)
            while chunk := await asyncio.to_thread(file.read, CHUNK_SIZE_BYTES):
                yield chunk


def contents_of(bundle: Bundle) -> Contents:
    """Whether a bundle has executables, weights or both, or adapters alone."""
    manifest = bundle.manifest
    if not manifest.has_executables:
        return "weights" if manifest.has_weights else "adapter"
    return "full" if manifest.has_weights else "executables"


class _GoldenRecord(msgspec.Struct, frozen=True):
    #: Records of earlier releases do not say it: they are of executables.
    method: GoldenMethod = "executables"


def _read_method(layout: Layout, digest: str) -> GoldenMethod | None:
    # Other tools attach files, too, of whatever bytes.
    with suppress(BundleError, msgspec.MsgspecError):
        record = read_small_blob(layout, digest, _MAX_GOLDEN_RECORD_BYTES)
        return msgspec.json.decode(record, type=_GoldenRecord).method
    return None
