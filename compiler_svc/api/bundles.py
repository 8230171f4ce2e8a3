"""`kiln.bundle.v1.BundleService`: validate, call, convert."""

# ruff: noqa: N802, ARG002 - names and arguments of the methods are gRPC's
from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Final

from kiln.bundle.v1 import bundle_pb2 as pb
from kiln.bundle.v1 import bundle_pb2_grpc

from compiler_svc.api.bundle_wire import (
    alias_to_pb,
    blob_to_pb,
    bundle_to_pb,
    collected_to_pb,
    golden_check_to_pb,
    import_event_to_pb,
    lease_to_pb,
    version_to_pb,
)
from compiler_svc.api.limits import StreamLimit
from compiler_svc.api.paging import choose_page_size, read_page_token, write_page_token
from compiler_svc.bundles.importer import BundleImporter, ImportOrder
from compiler_svc.bundles.store import BundleStore
from compiler_svc.database.names import Publisher
from edge.access.principal import PRINCIPAL

#: Streams of blobs that may be open at once; each holds a file open and a piece of at most 1 MiB.
MAX_BLOB_STREAMS: Final = 64


class BundleService(bundle_pb2_grpc.BundleServiceServicer):
    """Serves versions, aliases, leases and blobs."""

    def __init__(self, store: BundleStore, importer: BundleImporter) -> None:
        self._store = store
        self._importer = importer
        self._reading = StreamLimit("ReadBlob", MAX_BLOB_STREAMS)

    async def GetBundle(self, request: pb.GetBundleRequest, context: Any) -> pb.GetBundleResponse:
        """Resolves a reference to a bundle."""
        named = await self._store.get(request.ref)
        message = bundle_to_pb(named)
        referrers = await self._store.list_referrer_files(named.bundle.digest)
        message.referrers.extend(map(blob_to_pb, referrers))
        message.golden_check = golden_check_to_pb(await self._store.read_golden_method(referrers))
        return pb.GetBundleResponse(bundle=message)

    async def ListBundles(self, request: pb.ListBundlesRequest, context: Any) -> pb.ListBundlesResponse:
        """Lists versions."""
        page = await self._store.list_versions(
            name=request.name,
            page_size=choose_page_size(request.page_size),
            after=read_page_token(request.page_token, tuple[str, int]),
        )
        bundles = map(version_to_pb, page.versions)
        return pb.ListBundlesResponse(bundles=bundles, next_page_token=write_page_token(page.next_key))

    async def DeleteBundle(self, request: pb.DeleteBundleRequest, context: Any) -> pb.DeleteBundleResponse:
        """Removes one version."""
        freed = await self._store.delete(request.ref)
        return pb.DeleteBundleResponse(deleted_blob_count=freed.blob_count, deleted_size_bytes=freed.size_bytes)

    async def SetBundleOwner(self, request: pb.SetBundleOwnerRequest, context: Any) -> pb.SetBundleOwnerResponse:
        """Makes a name belong to a principal."""
        return pb.SetBundleOwnerResponse(former_owner=await self._store.give_name(request.name, request.owner))

    async def ReadBlob(self, request: pb.ReadBlobRequest, context: Any) -> AsyncIterator[pb.ReadBlobResponse]:
        """Streams the bytes of one blob."""
        with self._reading.take():
            async with aclosing(self._store.read_blob(request.digest, request.offset_bytes, ref=request.ref)) as chunks:
                async for chunk in chunks:
                    yield pb.ReadBlobResponse(data=chunk)

    async def SetAlias(self, request: pb.SetAliasRequest, context: Any) -> pb.SetAliasResponse:
        """Points an alias at a version."""
        etag = request.etag if request.HasField("etag") else None
        done = await self._store.set_alias(
            request.ref, request.alias, etag, require_compatible=request.require_compatible
        )
        return pb.SetAliasResponse(alias=alias_to_pb(done.alias), warnings=done.warnings)

    async def DeleteAlias(self, request: pb.DeleteAliasRequest, context: Any) -> pb.DeleteAliasResponse:
        """Removes an alias."""
        etag = request.etag if request.HasField("etag") else None
        await self._store.delete_alias(request.name, request.alias, etag)
        return pb.DeleteAliasResponse()

    async def ListAliases(self, request: pb.ListAliasesRequest, context: Any) -> pb.ListAliasesResponse:
        """Lists aliases."""
        return pb.ListAliasesResponse(aliases=map(alias_to_pb, await self._store.list_aliases(request.name)))

    async def LeaseBundle(self, request: pb.LeaseBundleRequest, context: Any) -> pb.LeaseBundleResponse:
        """Keeps a bundle from being collected."""
        duration_s = request.duration.ToNanoseconds() / 1e9 if request.HasField("duration") else None
        lease = await self._store.lease(request.ref, holder=request.holder, duration_s=duration_s)
        return pb.LeaseBundleResponse(lease=lease_to_pb(lease))

    async def ReleaseLease(self, request: pb.ReleaseLeaseRequest, context: Any) -> pb.ReleaseLeaseResponse:
        """Ends leases before their time."""
        count = await self._store.release_leases(holder=request.holder, digest=request.digest)
        return pb.ReleaseLeaseResponse(released_count=count)

    async def ListLeases(self, request: pb.ListLeasesRequest, context: Any) -> pb.ListLeasesResponse:
        """Lists leases."""
        return pb.ListLeasesResponse(leases=map(lease_to_pb, await self._store.list_leases(request.digest)))

    async def CollectGarbage(self, request: pb.CollectGarbageRequest, context: Any) -> pb.CollectGarbageResponse:
        """Removes bundles and blobs that nothing needs."""
        age_s = request.max_cache_age.ToNanoseconds() / 1e9 if request.HasField("max_cache_age") else None
        return collected_to_pb(await self._store.collect_garbage(dry_run=request.dry_run, max_cache_age_s=age_s))

    async def ImportBundle(
        self, request: pb.ImportBundleRequest, context: Any
    ) -> AsyncIterator[pb.ImportBundleResponse]:
        """Copies a bundle from another layout; streams progress, then the result."""
        order = ImportOrder(
            layout=request.layout,
            source_ref=request.source_ref,
            name=request.name,
            alias=request.alias or None,
            alias_etag=request.alias_etag if request.HasField("alias_etag") else None,
            publisher=Publisher.of(PRINCIPAL.get()),
        )
        async with aclosing(self._importer.run(order)) as events:
            async for event in events:
                yield import_event_to_pb(event)
