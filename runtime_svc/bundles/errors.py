"""Errors of sources of bundles.

RuntimeServiceError
└── BundleSourceCorrupt    a bundle service whose store has lost or changed bytes
"""

from __future__ import annotations

from runtime_svc.errors import RuntimeServiceError


class BundleSourceCorrupt(RuntimeServiceError):
    """A bundle service whose store has lost or changed bytes."""

    reason = "BUNDLE_SOURCE_CORRUPT"

    def __init__(self, source: str, detail: str) -> None:
        super().__init__(f"the store of the bundle service at {source}: {detail}", source=source, detail=detail)
