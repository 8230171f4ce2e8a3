"""Files of a bundle's blobs that no other user may change, because ranks map them and run them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import structlog

from bundle.errors import BlobNotFound
from bundle.host.exposure import FileStamp, describe_exposure
from bundle.host.reading import open_regular, reading
from bundle.host.shortage import name_shortage
from bundle.store.blob_writer import StoredBlob
from bundle.store.layout import Layout
from bundle.store.oci import BlobDescriptor
from bundle.store.reader import BlobFiles
from bundle.store.verification import BlobVerifier
from runtime_svc.bundles.errors import BlobExposed

_CHUNK_SIZE_BYTES: Final = 1 << 20

_log = structlog.get_logger("bundles")


class PrivateFiles:
    """The `BlobFiles` of a bundle: its own, or copies in the cache of those that other users may change."""

    def __init__(self, files: BlobFiles, cache: Layout, verifier: BlobVerifier) -> None:
        """Copies nothing before `secure`. Only this runtime writes `cache`.

        `verifier` gets the digests of copies, which are hashed while they are written.
        """
        self._files = files
        self._cache = cache
        self._verifier = verifier
        self._secured: dict[str, tuple[Path, FileStamp]] = {}

    def stored(self, digest: str) -> StoredBlob:
        """See `Layout.stored`."""
        return self._files.stored(digest)

    def blob_path(self, digest: str) -> Path:
        """Returns the path of a blob: that of its copy, if `secure` has made one."""
        if digest in self._secured:
            return self._secured[digest][0]
        return self._files.blob_path(digest)

    def secure(self, blob: BlobDescriptor) -> None:
        """Copies a blob into the cache if other users may change its file. The caller verifies it afterwards."""
        # It may just have been removed.
        with reading(lambda _: BlobNotFound(blob.digest)):
            path = self._files.blob_path(blob.digest)
            exposure = describe_exposure(path)
            if exposure is not None:
                path = self._find_copy(blob, path, exposure)
            self._secured[blob.digest] = path, FileStamp.of(path)

    def find_changed(self) -> str | None:
        """Returns the digest of a blob whose file has been written since `secure`; None if there is none."""
        for digest, (path, stamp) in list(self._secured.items()):
            if stamp.has_changed(path):
                return digest
        return None

    def _find_copy(self, blob: BlobDescriptor, path: Path, exposure: str) -> Path:
        try:
            if not self._cache.has(blob.digest):
                _log.warning("a file is copied, because others may change it", path=str(path), detail=exposure)
                self._copy(blob.digest, path)
            copy = self._cache.blob_path(blob.digest)
            if describe_exposure(copy) is None:
                return copy
            detail = "others may change the cache, too"
        except OSError as error:
            if (shortage := name_shortage(error)) is not None:
                raise shortage from error
            _log.warning("a file cannot be copied", path=str(path), error=str(error))
            detail = os.strerror(error.errno or 0)
        raise BlobExposed(blob.title or blob.digest, exposure, detail)

    def _copy(self, digest: str, path: Path) -> None:
        with open_regular(path) as source, self._cache.new_blob(expected_digest=digest) as writer:
            while data := source.read(_CHUNK_SIZE_BYTES):
                writer.write(data)
            writer.commit()
        self._verifier.remember(self._cache.blob_path(digest), digest)
