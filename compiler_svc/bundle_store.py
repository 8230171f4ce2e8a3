"""The service's bundles: versions in the database, bytes in the layout, and the two in agreement."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from sqlalchemy.orm import Session

from bundle.errors import BundleNotFound, RefInvalid
from bundle.layout import Layout
from bundle.reader import Bundle, open_bundle
from bundle.reference import is_alias, parse_reference
from bundle.removal import FreedSpace, remove_bundle
from compiler_svc.database import versions
from compiler_svc.database.engine import Database
from compiler_svc.database.versions import Alias, PageOfVersions, Version
from compiler_svc.errors import AliasInvalid, OffsetInvalid

CHUNK_SIZE_BYTES: Final = 1 << 20

T = TypeVar("T")


@dataclass(frozen=True)
class NamedBundle:
    """A bundle, and the version that names it; None where it was found by digest and none does."""

    bundle: Bundle
    version: Version | None


class BundleStore:
    """Versions, aliases and blobs."""

    def __init__(self, database: Database, layout: Layout) -> None:
        """Joins the two stores."""
        self._database = database
        self.layout = layout
        # A version is never added to a bundle that is just being removed.
        self._naming = asyncio.Lock()

    async def get(self, text: str) -> NamedBundle:
        """Resolves a reference.

        Raises:
            RefInvalid: It is none.
            BundleNotFound: It names nothing.
        """
        reference = parse_reference(text)
        try:
            version = await self._database.run(lambda session: versions.find_version(session, reference))
        except BundleNotFound:
            if reference.digest is None:
                raise
            version = None
        digest = reference.digest if version is None else version.digest
        assert digest is not None
        return NamedBundle(await self.open(digest), version)

    async def open(self, digest: str) -> Bundle:
        """Opens a published bundle; see `bundle.reader.open_bundle`."""
        return await asyncio.to_thread(open_bundle, self.layout, digest)

    async def name_bundle(self, name: str, digest: str, record: Callable[[Session, Version], T]) -> T:
        """Gives a bundle a version.

        Args:
            record: What else belongs to the same transaction; its result is returned.

        Raises:
            BundleNotFound: The bundle was removed meanwhile.
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
                )
                return record(session, version)

            return await self._database.run(work)

    async def delete(self, text: str) -> FreedSpace:
        """Removes a version; and its bundle, where no other version names it.

        Raises:
            RefInvalid: It is not of the form NAME:vN.
            BundleNotFound: There is no such version.
            BundleInUse: An alias names it.
        """
        reference = parse_reference(text)
        if reference.version is None:
            raise RefInvalid(text, "NAME:vN")

        def work(session: Session) -> tuple[str, bool]:
            version = versions.delete_version(session, reference)
            session.flush()
            return version.digest, versions.is_named(session, version.digest)

        async with self._naming:
            digest, still_named = await self._database.run(work)
            if still_named:
                return FreedSpace(0, 0)
            try:
                return await asyncio.to_thread(remove_bundle, self.layout, digest)
            except BundleNotFound:
                return FreedSpace(0, 0)

    async def list_versions(self, *, name: str, page_size: int, after: tuple[str, int] | None) -> PageOfVersions:
        """Lists versions by name, then newest first."""
        work = partial(versions.list_versions, name=name, page_size=page_size, after=after)
        return await self._database.run(work)

    async def set_alias(self, text: str, alias: str, etag: str | None) -> Alias:
        """Points an alias at a version; see `versions.set_alias`.

        Raises:
            RefInvalid: The reference is none, or a digest, which names no version.
            AliasInvalid: The alias is none.
        """
        reference = parse_reference(text)
        if reference.digest is not None:
            raise RefInvalid(text, "NAME, NAME:vN or NAME@ALIAS")
        if not is_alias(alias):
            raise AliasInvalid(alias)
        return await self._database.run(partial(versions.set_alias, reference=reference, alias=alias, etag=etag))

    async def delete_alias(self, name: str, alias: str, etag: str | None) -> None:
        """Removes an alias; see `versions.delete_alias`."""
        await self._database.run(partial(versions.delete_alias, name=name, alias=alias, etag=etag))

    async def list_aliases(self, name: str) -> Sequence[Alias]:
        """Aliases by name; of one bundle name, or of all where `name` is empty."""
        return await self._database.run(partial(versions.list_aliases, name=name))

    async def read_blob(self, digest: str, offset_bytes: int) -> AsyncGenerator[bytes, None]:
        """Yields the bytes of a blob from an offset on, in pieces of at most 1 MiB.

        Raises:
            DigestInvalid, BlobNotFound: The digest is none, or names nothing.
            OffsetInvalid: The offset lies outside the blob.
        """
        size_bytes = self.layout.stored(digest).size_bytes
        if not 0 <= offset_bytes <= size_bytes:
            raise OffsetInvalid(offset_bytes, size_bytes)
        with self.layout.open_blob(digest) as file:
            file.seek(offset_bytes)
            while chunk := await asyncio.to_thread(file.read, CHUNK_SIZE_BYTES):
                yield chunk
