"""The asynchronous client of kiln.bundle.v1.BundleService, a part of the compiler service."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, BinaryIO

from google.protobuf.duration_pb2 import Duration
from kiln.bundle.v1 import bundle_pb2 as pb
from kiln.bundle.v1.bundle_pb2_grpc import BundleServiceStub

from kiln_client.errors import InvalidArgument, NotFound, StreamIncomplete
from kiln_client.service_client import ServiceClient
from kiln_client.streams import AsyncStream

if TYPE_CHECKING:
    from kiln.bundle.v1.bundle_pb2_grpc import BundleServiceAsyncStub


class AsyncBundles(ServiceClient):
    """Lists, reads, changes and imports bundles, their versions and aliases.

    A `ref` is NAME, NAME:vN, NAME@ALIAS or sha256:HEX. Every method raises KilnError.
    """

    address_variable = "KILN_COMPILER"

    @cached_property
    def _stub(self) -> BundleServiceAsyncStub:
        return BundleServiceStub(self._channel)

    async def get_bundle(self, ref: str) -> pb.Bundle:
        """Resolves a reference to a bundle with its manifest, its blobs and the files of its referrers."""
        response = await self._ask(self._stub.GetBundle, pb.GetBundleRequest(ref=ref), self.timeouts.read_s)
        return response.bundle

    async def list_bundles(self, name: str = "") -> list[pb.Bundle]:
        """Lists every version of a name, or of all names, newest first within a name."""
        bundles: list[pb.Bundle] = []
        request = pb.ListBundlesRequest(name=name)
        while True:
            page = await self._ask(self._stub.ListBundles, request, self.timeouts.read_s)
            bundles.extend(page.bundles)
            if not page.next_page_token:
                return bundles
            request.page_token = page.next_page_token

    async def delete_bundle(self, ref: str) -> pb.DeleteBundleResponse:
        """Removes one version, NAME:vN, and the blobs that no other version needs."""
        return await self._ask(self._stub.DeleteBundle, pb.DeleteBundleRequest(ref=ref), self.timeouts.change_s)

    async def set_owner(self, name: str, owner: str) -> str:
        """Makes a bundle name belong to a principal; returns its former owner. Empty stands for no principal."""
        request = pb.SetBundleOwnerRequest(name=name, owner=owner)
        return (await self._ask(self._stub.SetBundleOwner, request, self.timeouts.read_s)).former_owner

    def read_blob(self, digest: str, *, offset_bytes: int = 0, ref: str = "") -> AsyncStream[pb.ReadBlobResponse]:
        """Streams the bytes of one blob, in order, from an offset.

        Args:
            digest: Digest of the blob.
            offset_bytes: First byte to send.
            ref: Bundle that has the blob. Tokens with patterns of bundle names need it, by name.
        """
        request = pb.ReadBlobRequest(digest=digest, offset_bytes=offset_bytes, ref=ref)
        return self._stream(self._stub.ReadBlob, request, self.timeouts.load_s)

    async def read_file(self, ref: str, file: str, sink: BinaryIO) -> pb.Blob:
        """Copies one file of a bundle, or of its referrers, into `sink`, and checks its digest.

        Args:
            ref: Bundle reference.
            file: Title, such as `graphs.jsonl.gz`, or digest, as the bundle lists them.
            sink: Takes the bytes. If this method raises, they may be wrong.

        Raises:
            NotFound: The bundle has no such file.
            InvalidArgument: Several files have that title.
            StreamIncomplete: The received bytes are not those of the file.
        """
        bundle = await self.get_bundle(ref)
        blob = _choose_file(bundle, ref, file)
        hashed, size_bytes = hashlib.sha256(), 0
        async with self.read_blob(blob.digest, ref=version_ref(bundle)) as responses:
            async for response in responses:
                hashed.update(response.data)
                size_bytes += sink.write(response.data)
        if (size_bytes, f"sha256:{hashed.hexdigest()}") != (blob.size_bytes, blob.digest):
            raise StreamIncomplete(f"{size_bytes} bytes that are not those of {blob.digest}")
        return blob

    async def set_alias(
        self, ref: str, alias: str, *, etag: str | None = None, require_compatible: bool = False
    ) -> pb.SetAliasResponse:
        """Points an alias at a version; `warnings` of the answer say if those who follow the alias cannot take it.

        Args:
            ref: Reference of the version.
            alias: What stands behind '@'.
            etag: Fail if the alias has changed since it had this etag.
            require_compatible: Fail if the version has another graph ABI than the one that the alias names.
        """
        request = pb.SetAliasRequest(ref=ref, alias=alias, etag=etag, require_compatible=require_compatible)
        return await self._ask(self._stub.SetAlias, request, self.timeouts.read_s)

    async def delete_alias(self, name: str, alias: str, *, etag: str | None = None) -> None:
        """Removes an alias. Its version stays."""
        request = pb.DeleteAliasRequest(name=name, alias=alias, etag=etag)
        await self._ask(self._stub.DeleteAlias, request, self.timeouts.read_s)

    async def list_aliases(self, name: str = "") -> list[pb.Alias]:
        """Lists the aliases of a name, or of all names."""
        request = pb.ListAliasesRequest(name=name)
        response = await self._ask(self._stub.ListAliases, request, self.timeouts.read_s)
        return [*response.aliases]

    async def lease_bundle(self, ref: str, holder: str, *, duration_s: float | None = None) -> pb.Lease:
        """Protects a bundle's blobs from collection. If the holder has a lease, renews it.

        Args:
            ref: Bundle reference.
            holder: Name of the holder, 1 to 128 characters.
            duration_s: Seconds from now until the lease ends: 1 second to 30 days. Default: 1 day.
        """
        request = pb.LeaseBundleRequest(ref=ref, holder=holder, duration=_duration(duration_s))
        return (await self._ask(self._stub.LeaseBundle, request, self.timeouts.read_s)).lease

    async def release_lease(self, holder: str, digest: str = "") -> int:
        """Ends a holder's lease on one bundle digest, or all of its leases; returns their number."""
        request = pb.ReleaseLeaseRequest(holder=holder, digest=digest)
        return (await self._ask(self._stub.ReleaseLease, request, self.timeouts.read_s)).released_count

    async def list_leases(self, digest: str = "") -> list[pb.Lease]:
        """Lists the leases on one bundle digest, or all leases, ordered by digest and holder."""
        request = pb.ListLeasesRequest(digest=digest)
        return [*(await self._ask(self._stub.ListLeases, request, self.timeouts.read_s)).leases]

    async def collect_garbage(
        self, *, dry_run: bool = False, max_cache_age_s: float | None = None
    ) -> pb.CollectGarbageResponse:
        """Removes bundles and blobs that no version, lease, running build or used executable cache entry needs.

        Args:
            dry_run: Report what a collection would remove, without removing it.
            max_cache_age_s: Forget cached executables that no bundle uses and that were last used more than this many
                seconds ago. None keeps them all.
        """
        request = pb.CollectGarbageRequest(dry_run=dry_run, max_cache_age=_duration(max_cache_age_s))
        return await self._ask(self._stub.CollectGarbage, request, self.timeouts.change_s)

    async def import_bundle(
        self,
        layout: str,
        name: str,
        *,
        source_ref: str = "",
        alias: str = "",
        alias_etag: str | None = None,
        on_progress: Callable[[pb.ImportProgress], None] = lambda _: None,
        timeout_s: float | None = None,
    ) -> pb.ImportResult:
        """Copies a bundle from another OCI image layout. Copies only missing blobs.

        Cancelling this call ends the import. The next import does not copy the same blobs again.

        Args:
            layout: Directory of the other layout on the compiler's host, under one of its import roots.
            name: Bundle name of the new version.
            source_ref: Digest or tag of the bundle in that layout; may be empty if it holds one bundle.
            alias: Alias to point at the new version; empty sets none.
            alias_etag: Etag that the alias must still have; empty if it must not exist; None skips the check.
            on_progress: Called with every progress event.
            timeout_s: Deadline, in seconds. Default: `timeouts.load_s`.
        """
        request = pb.ImportBundleRequest(
            layout=layout, source_ref=source_ref, name=name, alias=alias, alias_etag=alias_etag
        )
        async with self._stream(self._stub.ImportBundle, request, timeout_s or self.timeouts.load_s) as events:
            async for event in events:
                if event.WhichOneof("event") == "result":
                    return event.result
                on_progress(event.progress)
        raise StreamIncomplete("no result")


def version_ref(bundle: pb.Bundle) -> str:
    """Returns `name:vN`, or the digest if the bundle has no version."""
    return f"{bundle.name}:v{bundle.version}" if bundle.version else bundle.digest


def _choose_file(bundle: pb.Bundle, ref: str, file: str) -> pb.Blob:
    files = (*bundle.blobs, *bundle.referrers)
    # By digest, because files of equal bytes are one blob, and the manifest is a file and the config blob.
    found = list({blob.digest: blob for blob in files if file in (blob.title, blob.digest)}.values())
    if not found:
        titles = ", ".join(sorted({blob.title or blob.digest for blob in files}))
        raise NotFound(f"{ref} has no file {file!r}; it has {titles}", reason="FILE_NOT_FOUND")
    if len(found) > 1:
        digests = ", ".join(blob.digest for blob in found)
        raise InvalidArgument(f"{ref} has several files {file!r}; accepted: one of {digests}", reason="FILE_AMBIGUOUS")
    return found[0]


def _duration(seconds: float | None) -> Duration | None:
    if seconds is None:
        return None
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
