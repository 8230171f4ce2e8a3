"""Errors of sources of bundles."""

from __future__ import annotations

from runtime_svc.errors import RuntimeServiceError


class BundleSourceCorrupt(RuntimeServiceError, code="DATA_LOSS"):
    """A bundle service whose store has lost or changed bytes."""

    message = "the store of the bundle service at {source}: {detail}"
    source: str
    detail: str


class BundleSourceRefused(RuntimeServiceError, code="FAILED_PRECONDITION"):
    """A bundle service that does not take this runtime's token or certificate."""

    message = "the bundle service at {source} does not take this runtime's token or certificate: {detail}"
    source: str
    detail: str


class CompilerTokenInvalid(RuntimeServiceError, code="FAILED_PRECONDITION"):
    """A file of the token for the bundle service that cannot be read, or holds no token."""

    message = "token for the bundle service, {path}: {detail}"
    path: str
    detail: str


class BlobExposed(RuntimeServiceError, code="FAILED_PRECONDITION"):
    """A file of a bundle that other users may change, and that cannot be copied into the cache.

    The message names no directory of this host; the log does.
    """

    message = (
        "blob {blob} is not mapped, because others may change it: {exposure}; accepted: files and directories that "
        "only the runtime's user and root can write, or a cache for a copy ({detail})"
    )
    blob: str
    exposure: str
    detail: str
