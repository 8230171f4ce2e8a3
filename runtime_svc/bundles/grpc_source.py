"""The compiler's BundleService as a source of bundles. Only this file connects to it and converts its messages."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
from kiln.bundle.v1 import bundle_pb2, bundle_pb2_grpc

from bundle.errors import BlobNotFound, BundleNotFound, KilnError
from bundle.manifest_parser import parse_manifest
from bundle.store.oci import TITLE, BlobDescriptor
from edge.access.changing_file import ChangingFile
from edge.access.control import TOKEN_KEY
from edge.config import read_pem
from edge.errors import PlaintextRefused
from edge.loopback import channel_options, is_local
from runtime_svc.bundles.errors import BundleSourceCorrupt, BundleSourceRefused, CompilerTokenInvalid
from runtime_svc.bundles.source import ResolvedBundle
from runtime_svc.errors import BundleSourceUnavailable

LOOKUP_TIMEOUT_S: Final = 20.0
_REFUSALS: Final = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_OPTIONS: Final = (
    # A manifest with thousands of tensors is larger than gRPC's default limit.
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 1 << 20),
    # The client notices a peer that is gone, also in the middle of a blob.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # The client reconnects soon after a compiler comes back.
    ("grpc.max_reconnect_backoff_ms", 10_000),
)

_TOKEN: Final = re.compile(rb"[\w-]+(?:\.[\w-]+){2}", re.ASCII)


@dataclass(frozen=True, slots=True)
class CompilerEndpoint:
    """The address of the compiler, and the files for TLS.

    Attributes:
        ca_path: Certificates that the compiler's certificate must lead to, PEM; None connects in plaintext.
        certificate_path: This runtime's certificate chain, PEM, if the compiler asks for one; `key_path` has its key.
        token_path: File of the token that this runtime shows, read again when it has changed; None shows none.
        allow_insecure: Whether to connect in plaintext to addresses other than loopback, and show the token there.
    """

    address: str
    ca_path: Path | None = None
    certificate_path: Path | None = None
    key_path: Path | None = None
    token_path: Path | None = None
    allow_insecure: bool = False

    def __post_init__(self) -> None:
        if self.ca_path is None and not self.allow_insecure and not is_local(self.address):
            raise PlaintextRefused(self.address)

    def connect(self) -> grpc.aio.Channel:
        """Opens a channel, which connects at the first call."""
        options = (*_OPTIONS, *channel_options(self.address))
        if self.ca_path is None:
            return grpc.aio.insecure_channel(self.address, options=options)
        credentials = grpc.ssl_channel_credentials(
            root_certificates=read_pem(self.ca_path),
            private_key=None if self.key_path is None else read_pem(self.key_path),
            certificate_chain=None if self.certificate_path is None else read_pem(self.certificate_path),
        )
        return grpc.aio.secure_channel(self.address, credentials, options=options)


class CompilerToken:
    """The token that this runtime shows to the compiler."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else ChangingFile(path, _parse_token, CompilerTokenInvalid)

    async def metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns the metadata of the next call; empty without a token."""
        return () if self._file is None else ((TOKEN_KEY, f"Bearer {await self._file.read()}"),)


class GrpcBundleSource:
    """Client of a BundleService."""

    def __init__(self, endpoint: CompilerEndpoint) -> None:
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


def _parse_token(data: bytes) -> str:
    token = data.strip()
    if not _TOKEN.fullmatch(token):
        raise ValueError("it holds no JWT")
    return token.decode()
