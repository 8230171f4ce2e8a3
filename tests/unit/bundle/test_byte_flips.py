"""Every single-byte flip of a small bundle's blobs is refused, naming the blob."""

import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from bundle.errors import BlobCorrupt
from bundle.store.layout import Layout
from bundle.store.reader import Bundle, open_bundle
from bundle.store.verification import BlobVerifier
from tests.bundles.samples import DIGESTS, FILES, publish_sample

MAX_SMALL_BYTES = 4096
FLIPS_OF_LARGE = 2000
#: Whose bytes are read, hashed and parsed before anything else of the bundle is looked at.
MANIFESTS = ("image manifest", "manifest")


def flip_bytes(path: Path, offsets: Iterable[int]) -> Iterator[int]:
    """Yields with one byte of a file changed, for each offset; the file is whole again afterwards.

    A bit is flipped that depends on the offset, so that every bit is tried.
    """
    path.chmod(0o644)
    fd = os.open(path, os.O_RDWR)
    try:
        for offset in offsets:
            byte = os.pread(fd, 1, offset)
            os.pwrite(fd, bytes([byte[0] ^ 1 << offset % 8]), offset)
            try:
                yield offset
            finally:
                os.pwrite(fd, byte, offset)
    finally:
        os.close(fd)


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    return Layout.create(tmp_path_factory.mktemp("flips") / "layout")


@pytest.fixture(scope="module")
def bundle(layout: Layout) -> Bundle:
    return open_bundle(layout, publish_sample(layout))


@pytest.mark.parametrize("title", [*MANIFESTS, *(title for title, _, _ in FILES)])
def test_every_flip_is_refused_by_name(layout: Layout, bundle: Bundle, title: str) -> None:
    """All offsets of the small blobs, 2000 random ones of the large, through what a runtime does before it maps."""
    digest = {"image manifest": bundle.digest, "manifest": bundle.image.config.digest}.get(title) or DIGESTS[title]
    size_bytes = layout.stored(digest).size_bytes
    seed = random.SystemRandom().randrange(2**32)
    print(f"{title}: seed {seed}")  # noqa: T201 - pytest shows it with a failure
    chosen = random.Random(seed).sample(range(size_bytes), min(size_bytes, FLIPS_OF_LARGE))
    offsets = range(size_bytes) if size_bytes <= MAX_SMALL_BYTES else chosen
    verifier = BlobVerifier(None, always=True)

    def read() -> None:
        if title in MANIFESTS:
            open_bundle(layout, bundle.digest)
        else:
            verifier.verify(bundle.blob_path(digest), digest, title)

    refused = 0
    for offset in flip_bytes(layout.blob_path(digest), offsets):
        with pytest.raises(BlobCorrupt) as caught:
            read()
        assert caught.value.metadata["digest"] == digest, offset
        assert caught.value.metadata["title"] == (title if title in DIGESTS else ""), offset
        refused += 1
    assert refused == (size_bytes if size_bytes <= MAX_SMALL_BYTES else FLIPS_OF_LARGE)
    open_bundle(layout, bundle.digest).verify(verifier)


def test_a_flip_anywhere_fails_the_whole_bundle(layout: Layout, bundle: Bundle) -> None:
    for title, _, data in FILES:
        for _ in flip_bytes(layout.blob_path(DIGESTS[title]), (0, len(data) // 2, len(data) - 1)):
            with pytest.raises(BlobCorrupt, match=DIGESTS[title]):
                open_bundle(layout, bundle.digest).verify(BlobVerifier(None))
