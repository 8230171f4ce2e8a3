"""Unpacked bundles: folders with `manifest.json` and the other layers as files.

Volumes of artifacts and `oras pull` make such folders. They have no image manifest, so the digest of an unpacked bundle
is that of its `manifest.json`, which names the digests of all files that a runtime reads.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from bundle.consistency import check_consistency
from bundle.digest import sha256_bytes
from bundle.errors import BlobNotFound, BundleNotFound, ManifestInvalid
from bundle.host.reading import open_regular, reading
from bundle.manifest_parser import parse_manifest
from bundle.store.blob_writer import StoredBlob
from bundle.store.oci import (
    BUNDLE_TYPE,
    IMAGE_MANIFEST_TYPE,
    MANIFEST_TITLE,
    MANIFEST_TYPE,
    TITLE,
    BlobDescriptor,
    ImageManifest,
)
from bundle.store.reader import MAX_MANIFEST_BYTES, Bundle, check_layers
from bundle.store.verification import BlobVerifier

#: The media types of layers are in the image manifest, which such a folder lacks. A runtime does not need them.
_UNKNOWN_TYPE: Final = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class UnpackedFiles:
    """The files of a folder, by digest."""

    paths: Mapping[str, Path]

    def stored(self, digest: str) -> StoredBlob:
        """See `Layout.stored`."""
        with reading(lambda _: BlobNotFound(digest)):
            return StoredBlob(digest, self.blob_path(digest).lstat().st_size)

    def blob_path(self, digest: str) -> Path:
        """See `Layout.blob_path`."""
        path = self.paths.get(digest)
        with reading(lambda _: BlobNotFound(digest)):
            if path is None or not path.exists():
                raise BlobNotFound(digest)
            return path


def digest_unpacked(folder: Path) -> str:
    """Returns the digest of an unpacked bundle."""
    return sha256_bytes(_read_manifest(folder))


def open_unpacked(folder: Path, verifier: BlobVerifier) -> Bundle:
    """Opens an unpacked bundle. The verifier remembers the digests of its files, which are hashed the first time."""
    data = _read_manifest(folder)
    digest = sha256_bytes(data)
    manifest = parse_manifest(data, digest=digest)
    check_consistency(manifest, digest=digest)
    with reading(partial(BundleNotFound, folder.name)):
        paths = {verifier.identify(path): path for path in _list_files(folder)}
        for missing in sorted(manifest.blobs() - paths.keys()):
            raise BlobNotFound(missing, f"among the files of {folder.name}: one is missing, or has other bytes")
        layers = tuple(
            BlobDescriptor(
                media_type=_UNKNOWN_TYPE,
                digest=blob,
                size_bytes=paths[blob].lstat().st_size,
                annotations={TITLE: paths[blob].relative_to(folder).as_posix()},
            )
            for blob in sorted(manifest.blobs())
        )
    config = BlobDescriptor(media_type=MANIFEST_TYPE, digest=digest, size_bytes=len(data))
    image = ImageManifest(
        schema_version=2, media_type=IMAGE_MANIFEST_TYPE, artifact_type=BUNDLE_TYPE, config=config, layers=layers
    )
    check_layers(image, manifest, digest)
    return Bundle(
        layout=UnpackedFiles(paths | {digest: folder / MANIFEST_TITLE}),
        descriptor=config,
        image=image,
        manifest=manifest,
        manifest_json=data,
    )


def _read_manifest(folder: Path) -> bytes:
    def refuse(detail: str) -> BundleNotFound:
        return BundleNotFound(folder.name, f"its {MANIFEST_TITLE}: {detail}")

    with reading(refuse), open_regular(folder / MANIFEST_TITLE) as file:
        data = file.read(MAX_MANIFEST_BYTES + 1)
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestInvalid(f"{folder.name}/{MANIFEST_TITLE} is larger than {MAX_MANIFEST_BYTES} bytes")
    return data


def _list_files(folder: Path) -> Iterator[Path]:
    for directory, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(directory, name)
            if stat.S_ISREG(path.lstat().st_mode):
                yield path
