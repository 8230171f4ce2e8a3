"""Whatever a bundle's files hold, reading them succeeds or raises a documented error, and opens nothing outside."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundle.consistency import check_consistency
from bundle.digest import digest_hex, is_digest, parse_digest, sha256_bytes
from bundle.errors import AbiUnsupported, BundleError, DigestInvalid, LayoutInvalid, ManifestInvalid, RefInvalid
from bundle.manifest_parser import parse_manifest
from bundle.reference import is_alias, is_name, parse_reference
from bundle.store.catalog import find_bundle
from bundle.store.layout import Layout, read_pins
from bundle.store.oci import (
    BUNDLE_TYPE,
    IMAGE_MANIFEST_TYPE,
    INDEX_TYPE,
    MANIFEST_TYPE,
    REF_NAME,
    TITLE,
    BlobDescriptor,
    ImageManifest,
    Index,
    LayoutMarker,
    RecordT,
    parse_record,
)
from bundle.store.reader import is_title, open_bundle
from bundle.store.referrers import list_referrers
from tests.bundles.samples import DIGESTS, FILES, sample_manifest
from tests.fuzzing import broken, fuzz, mutated, nearly
from tests.opened_files import record_opened_files
from tests.unit.bundle.store.test_reader import encode, image_document, list_image

MANIFEST = json.loads(sample_manifest().to_json())
LAYERS = [
    {"mediaType": media_type, "digest": DIGESTS[title], "size": len(data), "annotations": {TITLE: title}}
    for title, media_type, data in FILES
]
CONFIG = sample_manifest().to_json()
IMAGE = {
    "schemaVersion": 2,
    "mediaType": IMAGE_MANIFEST_TYPE,
    "artifactType": BUNDLE_TYPE,
    "config": {"mediaType": MANIFEST_TYPE, "digest": sha256_bytes(CONFIG), "size": len(CONFIG)},
    "layers": LAYERS,
    "subject": {"mediaType": IMAGE_MANIFEST_TYPE, "digest": sha256_bytes(b"subject"), "size": 7},
}
#: A link in the layout to a file that no reader may open.
LINK = f"sha256:{'5' * 64}"
INDEX = {
    "schemaVersion": 2,
    "mediaType": INDEX_TYPE,
    "manifests": [
        {
            "mediaType": IMAGE_MANIFEST_TYPE,
            "digest": sha256_bytes(encode(IMAGE)),
            "size": len(encode(IMAGE)),
            "artifactType": BUNDLE_TYPE,
            "annotations": {REF_NAME: "tiny:v1"},
            "platform": {"os": "linux", "architecture": "amd64"},
        },
        {"mediaType": INDEX_TYPE, "digest": LINK, "size": 31},
        {"mediaType": IMAGE_MANIFEST_TYPE, "digest": DIGESTS["tokenizer.json"], "size": 24},
    ],
}
NAMES = ("llama", "llama:v12", "llama@prod", f"sha256:{'0a' * 32}", "a.b-c_d:v1", "v1@v")


@pytest.fixture(scope="module", autouse=True)
def unsynced() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _fd: None)
        yield


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    """A layout that examples of a test overwrite in turn; beside it is a file that no reader may open."""
    directory = tmp_path_factory.mktemp("fuzzed")
    (directory / "secret").write_text('{"imageLayoutVersion":"1.0.0"}')
    layout = Layout.create(directory / "layout")
    for data in (encode(IMAGE), CONFIG, *(data for _, _, data in FILES)):
        layout.put_blob(data)
    (layout.root / "blobs" / "sha256" / ("5" * 64)).symlink_to(directory / "secret")
    return layout


def read_all(layout: Layout, digest: str) -> None:
    """Opens, finds and lists, and ignores errors of bundles. Only files of the layout may be opened."""
    allowed = {layout.root, layout.root / "blobs" / "sha256"}
    with record_opened_files() as opened:
        with suppress(BundleError):
            assert open_bundle(layout, digest).digest == digest
        with suppress(BundleError):
            assert is_digest(find_bundle(layout, "tiny:v1"))
        with suppress(BundleError):
            list_referrers(layout, sha256_bytes(b"subject"))
    assert opened
    for path, flags in set(opened):
        # A link is opened with O_NOFOLLOW, which refuses it.
        assert path.parent in allowed
        assert flags & os.O_NOFOLLOW
        assert not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)


@fuzz()
@given(data=mutated(MANIFEST) | broken(CONFIG) | st.binary(max_size=64))
def test_manifests(data: bytes) -> None:
    try:
        manifest = parse_manifest(data)
        check_consistency(manifest)
    except (ManifestInvalid, AbiUnsupported):
        return
    assert all(map(is_digest, manifest.blobs()))
    assert parse_manifest(manifest.to_json()) == manifest


@fuzz(500)
@given(data=mutated(MANIFEST))
def test_manifests_in_a_layout(layout: Layout, data: bytes) -> None:
    digest = list_image(layout, encode(image_document(layout, data)))
    read_all(layout, digest)
    for garbage in {digest, sha256_bytes(data)} - {sha256_bytes(CONFIG)}:
        layout.delete_blob(garbage)


@fuzz()
@given(data=mutated(INDEX) | broken(encode(INDEX)))
def test_indices(layout: Layout, data: bytes) -> None:
    (layout.root / "index.json").write_bytes(data)
    with suppress(LayoutInvalid):
        assert all(is_digest(entry.digest) for entry in layout.read_index().manifests)
    read_all(layout, sha256_bytes(encode(IMAGE)))


@fuzz()
@given(data=mutated(IMAGE) | broken(encode(IMAGE)))
def test_image_manifests(layout: Layout, data: bytes) -> None:
    digest = list_image(layout, data)
    read_all(layout, digest)
    if data != encode(IMAGE):
        layout.delete_blob(digest)


# A file with one field, each time a file: fewer examples find as much.
@fuzz(1000)
@given(data=mutated({"imageLayoutVersion": "1.0.0"}) | broken(b'{"imageLayoutVersion":"1.0.0"}'))
def test_layout_markers(layout: Layout, data: bytes) -> None:
    marker = layout.root / "oci-layout"
    whole = marker.read_bytes()
    marker.write_bytes(data)
    try:
        with suppress(LayoutInvalid):
            Layout(layout.root)
    finally:
        marker.write_bytes(whole)


@pytest.mark.parametrize(
    ("record", "document"),
    [
        (BlobDescriptor, LAYERS[0]),
        (ImageManifest, IMAGE),
        (Index, INDEX),
        (LayoutMarker, {"imageLayoutVersion": "1.0.0"}),
    ],
)
def test_records(record: type[RecordT], document: object) -> None:
    @fuzz(500)
    @given(data=mutated(document) | st.binary(max_size=64))
    def check(data: bytes) -> None:
        with suppress(ValueError):
            parsed = parse_record(data, record)
            assert parse_record(parsed.to_json(), record) == parsed

    check()


@fuzz()
@given(text=nearly(*NAMES))
def test_references(text: str) -> None:
    try:
        reference = parse_reference(text)
    except RefInvalid:
        return
    assert str(reference) == text
    assert (reference.digest is None) == (reference.name is not None)
    assert reference.version is None or reference.alias is None
    assert reference.digest is None or is_digest(reference.digest)
    assert reference.name is None or is_name(reference.name)
    assert reference.alias is None or is_alias(reference.alias)


@fuzz()
@given(text=nearly(f"sha256:{'0a' * 32}"))
def test_digests(layout: Layout, text: str) -> None:
    try:
        digest = parse_digest(text)
    except DigestInvalid:
        for access in (layout.has, layout.stored, layout.open_blob, layout.blob_path, layout.delete_blob, layout.pin):
            with pytest.raises(DigestInvalid):
                access(text)
        with pytest.raises(DigestInvalid):
            layout.new_blob(expected_digest=text)
        return
    assert len(digest_hex(digest)) == 64
    assert set(digest_hex(digest)) <= set("0123456789abcdef")


@fuzz()
@given(text=nearly("a", "a/b", "weights/tp0_sharded_checkpoint.safetensors", "a/b/../c", "~/é/b c"))
def test_titles(text: str) -> None:
    """A title that is accepted names a file below the directory that it is written to, and only there."""
    if is_title(text):
        root = Path("/bundle")
        assert Path(os.path.normpath(root / text)).is_relative_to(root)
        assert Path(os.path.normpath(root / text)) != root
        assert "\0" not in text


@fuzz(500)
@given(data=st.binary(max_size=100) | broken(f"sha256:{'0' * 64}\n".encode() * 3))
def test_pins(layout: Layout, data: bytes) -> None:
    with layout.pinning() as writer:
        writer.pin(f"sha256:{'1' * 64}")
        (path,) = (layout.root / ".kiln" / "pins").iterdir()
        with path.open("ab") as file:
            file.write(b"\n" + data)
        assert f"sha256:{'1' * 64}" in read_pins(path.parent)
        assert all(map(is_digest, read_pins(path.parent)))
