"""The protocol of bundle sources."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from bundle.manifest import Manifest
from bundle.store.oci import BlobDescriptor


@dataclass(frozen=True, slots=True)
class ResolvedBundle:
    """The bundle that a reference names now.

    The manifest is as the source describes it, for early refusals: it is not verified against the digest. The blobs
    include the manifests. `version` is `NAME:vN`; empty if the source knows none.
    """

    ref: str
    digest: str
    manifest: Manifest
    blobs: tuple[BlobDescriptor, ...]
    version: str = ""


class BundleSource(Protocol):
    """A service that resolves references, sends blobs and grants leases."""

    async def resolve(self, ref: str) -> ResolvedBundle:
        """Resolves a reference.

        Raises:
            BundleNotFound: The reference names no bundle.
            BundleSourceUnavailable, BundleSourceCorrupt: The service does not answer, or its store is damaged.
            BundleSourceRefused, CompilerTokenInvalid: It does not take this runtime's token, or there is none to show;
                so for the other methods.
            ManifestInvalid, AbiUnsupported: This code cannot read the bundle's manifest.
        """

    def read_blob(self, digest: str) -> AsyncIterator[bytes]:
        """Yields the bytes of a blob in order, not verified.

        Raises:
            BlobNotFound: The service does not hold the blob.
            BundleSourceUnavailable: The service does not answer, or the connection broke.
            BundleSourceCorrupt: Its store is damaged.
        """

    async def lease(self, digest: str, holder: str, duration_s: float) -> None:
        """Takes or renews a lease, which keeps a bundle from being collected for `duration_s` from now.

        Raises:
            BundleNotFound: The service does not hold the bundle.
            BundleSourceUnavailable: The service does not answer.
        """

    async def release(self, digest: str, holder: str) -> None:
        """Gives the holder's lease back, if it has one.

        Raises:
            BundleSourceUnavailable: The service does not answer.
        """
