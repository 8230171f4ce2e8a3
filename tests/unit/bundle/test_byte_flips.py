"""Every single-byte flip of a small bundle's blobs is refused, naming the blob."""

import random
import time
from pathlib import Path

import pytest

from bundle.errors import BlobCorrupt
from bundle.layout import Layout
from bundle.reader import Bundle, open_bundle
from bundle.verification import SETTLE_TIME_NS, BlobVerifier
from bundle.writer import BundleWriter
from tests.bundles.samples import DIGESTS, FILES, publish_sample, sample_manifest
from tests.unit.bundle.byte_flips import flip_bytes

MAX_SMALL_BYTES = 4096
FLIPS_OF_LARGE = 2000
#: Whose bytes are read, hashed and parsed before anything else of the bundle is looked at.
MANIFESTS = ("image manifest", "manifest")


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    return Layout.create(tmp_path_factory.mktemp("flips") / "layout")


@pytest.fixture(scope="module")
def bundle(layout: Layout) -> Bundle:
    return open_bundle(layout, publish_sample(layout))


def test_the_bundle_has_small_and_large_blobs(bundle: Bundle) -> None:
    sizes = [blob.size_bytes for blob in bundle.blobs]
    assert min(sizes) < 100
    assert sum(size > MAX_SMALL_BYTES for size in sizes) == 2


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


def test_flips_after_a_verification_that_is_remembered_are_refused(tmp_path: Path) -> None:
    """A remembered blob is not hashed again, and a change of it shows in its times."""
    layout = Layout.create(tmp_path / "layout")
    bundle = open_bundle(layout, publish_sample(layout))
    cache = tmp_path / "verified.sqlite"
    bundle.verify(BlobVerifier(cache))
    for title, _, data in FILES:
        offsets = (0, len(data) // 3, len(data) - 1)
        for _ in flip_bytes(layout.blob_path(DIGESTS[title]), offsets):
            with pytest.raises(BlobCorrupt, match=DIGESTS[title]):
                bundle.verify(BlobVerifier(cache))
        # Written back: the bytes are whole again, and are remembered once more.
        time.sleep(2 * SETTLE_TIME_NS / 1e9)
        bundle.verify(BlobVerifier(cache))


def test_flips_in_a_bundle_that_is_being_written_are_refused(tmp_path: Path) -> None:
    """A blob that changed in the store before the bundle was published."""
    layout = Layout.create(tmp_path / "layout")
    writer = BundleWriter(layout)
    for title, media_type, data in FILES:
        writer.add_blob(data, media_type, title)
    digest = writer.publish(sample_manifest())
    for _ in flip_bytes(layout.blob_path(DIGESTS["tokenizer.json"]), (3,)):
        with pytest.raises(BlobCorrupt, match=r"tokenizer\.json"):
            open_bundle(layout, digest).verify(BlobVerifier(None))
