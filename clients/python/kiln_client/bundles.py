"""The asynchronous client of kiln.bundle.v1.BundleService, which the compiler service serves."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from kiln.bundle.v1 import bundle_pb2 as pb
from kiln.bundle.v1.bundle_pb2_grpc import BundleServiceStub

from kiln_client.service_client import ServiceClient
from kiln_client.streams import AsyncStream

if TYPE_CHECKING:
    from kiln.bundle.v1.bundle_pb2_grpc import BundleServiceAsyncStub


class AsyncBundles(ServiceClient):
    """Bundles, their versions and aliases.

    A `ref` is NAME, NAME:vN, NAME@ALIAS or sha256:HEX. Every method raises KilnError.
    """

    address_variable = "KILN_COMPILER"

    @cached_property
    def _stub(self) -> BundleServiceAsyncStub:
        return BundleServiceStub(self._channel)

    async def get_bundle(self, ref: str) -> pb.Bundle:
        """Resolves a reference; the bundle has its manifest and blobs."""
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

    def read_blob(self, digest: str, *, offset_bytes: int = 0) -> AsyncStream[pb.ReadBlobResponse]:
        """Streams the bytes of one blob, in order, from an offset."""
        request = pb.ReadBlobRequest(digest=digest, offset_bytes=offset_bytes)
        return self._stream(self._stub.ReadBlob, request, self.timeouts.load_s)

    async def set_alias(self, ref: str, alias: str, *, etag: str | None = None) -> pb.Alias:
        """Points an alias at a version; with `etag`, only if the alias has not changed since."""
        request = pb.SetAliasRequest(ref=ref, alias=alias, etag=etag)
        return (await self._ask(self._stub.SetAlias, request, self.timeouts.read_s)).alias

    async def delete_alias(self, name: str, alias: str, *, etag: str | None = None) -> None:
        """Removes an alias; the version stays."""
        request = pb.DeleteAliasRequest(name=name, alias=alias, etag=etag)
        await self._ask(self._stub.DeleteAlias, request, self.timeouts.read_s)

    async def list_aliases(self, name: str = "") -> list[pb.Alias]:
        """Lists the aliases of a name, or of all names."""
        request = pb.ListAliasesRequest(name=name)
        response = await self._ask(self._stub.ListAliases, request, self.timeouts.read_s)
        return [*response.aliases]
