"""BundleService as a source of bundles. Only this file converts its messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import grpc
from kiln.bundle.v1 import bundle_pb2, bundle_pb2_grpc

from bundle.errors import BlobNotFound, BundleNotFound, KilnError
from bundle.manifest import parse_manifest
from bundle.oci import TITLE, BlobDescriptor
from runtime_svc.bundles.channel import CompilerEndpoint, CompilerToken
from runtime_svc.bundles.errors import BundleSourceCorrupt, BundleSourceRefused
from runtime_svc.bundles.source import ResolvedBundle
from runtime_svc.errors import BundleSourceUnavailable

LOOKUP_TIMEOUT_S: Final = 20.0
_REFUSALS: Final = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


class GrpcBundleSource:
    """Client of a BundleService."""

    def __init__(self, endpoint: CompilerEndpoint) -> None:
        """Connects at the first call; make it on the running event loop.

        Raises:
            TlsFileInvalid: See `CompilerEndpoint.connect`.
        """
        self._address = endpoint.address
        self._channel = endpoint.connect()
        self._token = CompilerToken(endpoint.token_path)
        self._stub = bundle_pb2_grpc.BundleServiceStub(self._channel)

    async def resolve(self, ref: str) -> ResolvedBundle:
        """See `BundleSource.resolve`."""
        try:
            response = await self._stub.GetBundle(
                bundle_pb2.GetBundleRequest(ref=ref), timeout=LOOKUP_TIMEOUT_S, metadata=await self._token.metadata()
            )
        except grpc.aio.AioRpcError as error:
            # The compiler says which versions there are.
            detail = (error.details() or "").partition(f"no bundle {ref!r}: ")[2]
            raise self._translate(error, BundleNotFound(ref, detail)) from error
        pb = response.bundle
        return ResolvedBundle(
            ref=ref,
            digest=pb.digest,
            manifest=parse_manifest(pb.manifest_json, digest=pb.digest),
            blobs=tuple(_descriptor_from_pb(blob) for blob in pb.blobs),
            version=f"{pb.name}:v{pb.version}" if pb.version else "",
        )

    async def read_blob(self, digest: str) -> AsyncIterator[bytes]:
        """See `BundleSource.read_blob`."""
        try:
            request = bundle_pb2.ReadBlobRequest(digest=digest)
            async for response in self._stub.ReadBlob(request, metadata=await self._token.metadata()):
                yield response.data
        except grpc.aio.AioRpcError as error:
            raise self._translate(error, BlobNotFound(digest)) from error

    async def lease(self, digest: str, holder: str, duration_s: float) -> None:
        """See `BundleSource.lease`."""
        request = bundle_pb2.LeaseBundleRequest(ref=digest, holder=holder)
        request.duration.FromNanoseconds(round(duration_s * 1e9))
        try:
            await self._stub.LeaseBundle(request, timeout=LOOKUP_TIMEOUT_S, metadata=await self._token.metadata())
        except grpc.aio.AioRpcError as error:
            raise self._translate(error, BundleNotFound(digest)) from error

    async def release(self, digest: str, holder: str) -> None:
        """See `BundleSource.release`."""
        request = bundle_pb2.ReleaseLeaseRequest(holder=holder, digest=digest)
        try:
            await self._stub.ReleaseLease(request, timeout=LOOKUP_TIMEOUT_S, metadata=await self._token.metadata())
        except grpc.aio.AioRpcError as error:
            raise self._translate(error, BundleNotFound(digest)) from error

    async def close(self) -> None:
        """Closes the connection."""
        await self._channel.close()

    def _translate(self, error: grpc.aio.AioRpcError, not_found: KilnError) -> KilnError:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return not_found
        if error.code() is grpc.StatusCode.DATA_LOSS:
            # Waiting does not bring the bytes back.
            return BundleSourceCorrupt(self._address, error.details() or "")
        if error.code() in _REFUSALS:
            return BundleSourceRefused(self._address, error.details() or "")
        return BundleSourceUnavailable(self._address, f"{error.code().name}: {error.details()}")


def _descriptor_from_pb(pb: bundle_pb2.Blob) -> BlobDescriptor:
    return BlobDescriptor(
        media_type=pb.media_type,
        digest=pb.digest,
        size_bytes=pb.size_bytes,
        annotations={TITLE: pb.title} if pb.title else None,
    )
