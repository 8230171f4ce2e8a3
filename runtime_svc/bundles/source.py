"""Where bundles come from."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from bundle.manifest import Manifest
from bundle.oci import BlobDescriptor


@dataclass(frozen=True, slots=True)
class ResolvedBundle:
    """What a reference stands for now.

    Attributes:
        ref: The reference, as asked for.
        digest: Digest of the bundle.
        manifest: As the source describes it: good for refusing early, not verified against the digest.
        blobs: Every blob, the manifests included.
    """

    ref: str
    digest: str
    manifest: Manifest
    blobs: tuple[BlobDescriptor, ...]


class BundleSource(Protocol):
    """A bundle service."""

    async def resolve(self, ref: str) -> ResolvedBundle:
        """Looks a reference up.

        Raises:
            BundleNotFound: It names nothing.
            BundleSourceUnavailable: The service does not answer.
            ManifestInvalid, AbiUnsupported: The bundle is of another kind than this code knows.
        """

    def read_blob(self, digest: str) -> AsyncIterator[bytes]:
        """The bytes of a blob, in order, not verified.

        Raises:
            BlobNotFound: The service does not hold it.
            BundleSourceUnavailable: The service does not answer, or the connection broke.
        """

    async def lease(self, digest: str, holder: str, duration_s: float) -> None:
        """Keeps a bundle from being collected for so long from now, instead of until the holder's last lease ends.

        Raises:
            BundleNotFound: The service does not hold it.
            BundleSourceUnavailable: The service does not answer.
        """

    async def release(self, digest: str, holder: str) -> None:
        """Gives a lease back, if there is one.

        Raises:
            BundleSourceUnavailable: The service does not answer.
        """
