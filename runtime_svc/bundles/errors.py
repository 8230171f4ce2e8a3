"""Errors of sources of bundles.

RuntimeServiceError
├── BundleSourceCorrupt    a bundle service whose store has lost or changed bytes
├── BundleSourceRefused    a bundle service that does not take this runtime's token or certificate
├── CompilerTokenInvalid   a token for the bundle service that cannot be read
└── BlobExposed            a file that other users may change, and that cannot be copied
"""

from __future__ import annotations

from runtime_svc.errors import RuntimeServiceError


class BundleSourceCorrupt(RuntimeServiceError):
    """A bundle service whose store has lost or changed bytes."""

    reason = "BUNDLE_SOURCE_CORRUPT"

    def __init__(self, source: str, detail: str) -> None:
        super().__init__(f"the store of the bundle service at {source}: {detail}", source=source, detail=detail)


class BundleSourceRefused(RuntimeServiceError):
    """A bundle service that does not take this runtime's token or certificate."""

    reason = "BUNDLE_SOURCE_REFUSED"

    def __init__(self, source: str, detail: str) -> None:
        super().__init__(
            f"the bundle service at {source} does not take this runtime's token or certificate: {detail}",
            source=source,
            detail=detail,
        )


class CompilerTokenInvalid(RuntimeServiceError):
    """A file of the token for the bundle service that cannot be read, or holds no token."""

    reason = "COMPILER_TOKEN_INVALID"

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(f"token for the bundle service, {path}: {detail}", path=path, detail=detail)


class BlobExposed(RuntimeServiceError):
    """A file of a bundle that other users may change, and that cannot be copied into the cache.

    The message names no directory of this host; the log does.
    """

    reason = "BLOB_EXPOSED"

    def __init__(self, blob: str, exposure: str, detail: str) -> None:
        super().__init__(
            f"blob {blob} is not mapped, because others may change it: {exposure}; accepted: files and directories "
            f"that only the runtime's user and root can write, or a cache for a copy ({detail})",
            blob=blob,
            exposure=exposure,
            detail=detail,
        )
