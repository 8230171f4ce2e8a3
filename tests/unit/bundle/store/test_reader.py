import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bundle.digest import sha256_bytes
from bundle.errors import (
    AbiUnsupported,
    BlobCorrupt,
    BlobMissing,
    BlobNotFound,
    BundleNotFound,
    DigestInvalid,
    LayoutInvalid,
    ManifestInvalid,
)
from bundle.store.layout import Layout
from bundle.store.oci import BUNDLE_TYPE, IMAGE_MANIFEST_TYPE, INDEX_TYPE, MANIFEST_TYPE, TITLE
from bundle.store.reader import MAX_IMAGE_MANIFEST_BYTES, open_bundle
from bundle.store.verification import BlobVerifier
from tests.bundles.samples import (
    DIGESTS,
    FILES,
    Contents,
    publish_adapter,
    publish_sample,
    sample_manifest,
    unlist_manifest,
)

Json = dict[str, Any]


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout.create(tmp_path / "layout")


def plant(layout: Layout, data: bytes) -> Json:
    """Puts a blob where it belongs, without waiting for the disk; returns its descriptor."""
    digest = sha256_bytes(data)
    path = layout.root / "blobs" / "sha256" / digest.removeprefix("sha256:")
    if not path.exists():
        path.write_bytes(data)
    return {"mediaType": IMAGE_MANIFEST_TYPE, "digest": digest, "size": len(data)}


def list_image(layout: Layout, image: bytes) -> str:
    """Lists any bytes as the layout's one image manifest; returns their digest."""
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [plant(layout, image)]}
    (layout.root / "index.json").write_text(json.dumps(index))
    return sha256_bytes(image)


def image_document(layout: Layout, manifest: bytes) -> Json:
    """An image manifest whose config is `manifest`, and whose layers are the sample's files."""
    layers = [
        plant(layout, data) | {"mediaType": media_type, "annotations": {TITLE: title}}
        for title, media_type, data in FILES
    ]
    return {
        "schemaVersion": 2,
        "mediaType": IMAGE_MANIFEST_TYPE,
        "artifactType": BUNDLE_TYPE,
        "config": plant(layout, manifest) | {"mediaType": MANIFEST_TYPE},
        "layers": layers,
    }


def encode(document: object) -> bytes:
    return json.dumps(document).encode()


def test_bundle_comes_back(layout: Layout) -> None:
    digest = publish_sample(layout)
    bundle = open_bundle(layout, digest)
    assert bundle.digest == digest
    assert bundle.manifest == sample_manifest()
    assert bundle.blob_path(DIGESTS["tokenizer.json"]).read_bytes() == FILES[-1][2]
    assert {blob.title for blob in bundle.blobs} == {title for title, _, _ in FILES} | {"", "manifest.json"}
    assert bundle.size_bytes == sum(layout.stored(digest).size_bytes for digest in layout.list_blobs())


@pytest.mark.parametrize("contents", ["executables", "weights"])
def test_bundle_of_one_kind_of_contents_comes_back(layout: Layout, contents: Contents) -> None:
    bundle = open_bundle(layout, publish_sample(layout, contents=contents))
    assert bundle.manifest == sample_manifest(contents=contents)
    assert {blob.title.partition("/")[0] for blob in bundle.blobs} == {contents, "manifest.json", "tokenizer.json", ""}
    bundle.verify(BlobVerifier(None))


def test_blob_that_two_layers_share_counts_once(layout: Layout) -> None:
    document = image_document(layout, sample_manifest().to_json())
    document["layers"].append(document["layers"][-1] | {"annotations": {TITLE: "second name"}})
    bundle = open_bundle(layout, list_image(layout, encode(document)))
    assert bundle.size_bytes == sum(layout.stored(digest).size_bytes for digest in layout.list_blobs())


def test_the_manifest_knows_the_sizes_of_adapters(layout: Layout) -> None:
    with pytest.raises(ManifestInvalid, match="of rank 0 are said to have 1 bytes; the layer has 13"):
        publish_adapter(layout, size_bytes=1)


def test_whole_bundle_verifies_with_its_size_as_progress(layout: Layout, tmp_path: Path) -> None:
    bundle = open_bundle(layout, publish_sample(layout))
    verifier = BlobVerifier(tmp_path / "cache")
    for _ in range(2):
        reported: list[int] = []
        bundle.verify(verifier, reported.append)
        assert sum(reported) == bundle.size_bytes


def test_truncated_blob_is_found_on_opening(layout: Layout) -> None:
    digest = publish_sample(layout)
    path = layout.blob_path(DIGESTS[FILES[2][0]])
    path.chmod(0o644)
    path.write_bytes(FILES[2][2][:-1])
    with pytest.raises(BlobCorrupt, match="16383 bytes long instead of 16384"):
        open_bundle(layout, digest)


def test_missing_blob_is_found_on_opening_and_on_verifying(layout: Layout) -> None:
    digest = publish_sample(layout)
    bundle = open_bundle(layout, digest)
    layout.delete_blob(DIGESTS["tokenizer.json"])
    with pytest.raises(BlobMissing, match=DIGESTS["tokenizer.json"]) as caught:
        open_bundle(layout, digest)
    assert caught.value.metadata["bundle"] == digest
    with pytest.raises(BlobNotFound, match=DIGESTS["tokenizer.json"]):
        bundle.verify(BlobVerifier(None))


def test_unlisted_bundle_is_not_found(layout: Layout) -> None:
    digest = publish_sample(layout)
    unlist_manifest(layout, digest)
    with pytest.raises(BundleNotFound, match=digest):
        open_bundle(layout, digest)
    with pytest.raises(DigestInvalid):
        open_bundle(layout, "tiny:v1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda image: image.update(schemaVersion=1), r"schemaVersion"),
        (lambda image: image.update(mediaType=INDEX_TYPE), "mediaType"),
        (lambda image: image.update(artifactType="application/vnd.other"), BUNDLE_TYPE),
        (lambda image: image.pop("artifactType"), BUNDLE_TYPE),
        (lambda image: image["config"].update(mediaType="text/plain"), re.escape(MANIFEST_TYPE)),
        (lambda image: image["config"].update(digest="sha256:../../x"), r"config\.digest"),
        (lambda image: image.pop("layers"), "layers"),
        (lambda image: image["layers"].pop(0), "is no layer"),
        (lambda image: image["layers"][0].pop("annotations"), "layer title ''"),
        (lambda image: image["layers"].append(image["layers"][0]), "same title"),
        (lambda image: image["layers"][0].update(annotations={TITLE: "../../x"}), "layer title '../../x'"),
    ],
)
def test_image_manifest_that_is_no_bundle_is_named(
    layout: Layout, change: Callable[[Json], object], message: str
) -> None:
    document = image_document(layout, sample_manifest().to_json())
    change(document)
    digest = list_image(layout, encode(document))
    with pytest.raises(ManifestInvalid, match=message) as caught:
        open_bundle(layout, digest)
    assert caught.value.metadata["digest"] == digest


def test_bytes_of_a_manifest_with_unknown_fields_are_kept(layout: Layout) -> None:
    data = encode(json.loads(sample_manifest().to_json()) | {"new": {"b": 1, "a": 2.50}})
    bundle = open_bundle(layout, list_image(layout, encode(image_document(layout, data))))
    assert bundle.manifest == sample_manifest()
    assert bundle.manifest_json == data


def test_manifest_of_another_abi_is_refused(layout: Layout) -> None:
    manifest = json.loads(sample_manifest().to_json()) | {"abi_version": 2, "new": True}
    digest = list_image(layout, encode(image_document(layout, encode(manifest))))
    with pytest.raises(AbiUnsupported, match=r"abi_version: got 2; accepted: 1"):
        open_bundle(layout, digest)


def test_inconsistent_manifest_is_refused(layout: Layout) -> None:
    manifest = json.loads(sample_manifest().to_json())
    manifest["executables"][0]["constants"][0]["tensor"] = "absent"
    digest = list_image(layout, encode(image_document(layout, encode(manifest))))
    with pytest.raises(ManifestInvalid, match="'absent'") as caught:
        open_bundle(layout, digest)
    assert caught.value.metadata["digest"] == digest


def test_huge_manifest_is_not_read(layout: Layout) -> None:
    digest = list_image(layout, b" " * (MAX_IMAGE_MANIFEST_BYTES + 1))
    with pytest.raises(ManifestInvalid, match="larger than 4194304 bytes"):
        open_bundle(layout, digest)


def test_deeply_nested_documents_are_refused_by_name(layout: Layout) -> None:
    nested = b'{"config":' + b"[" * 100_000
    with pytest.raises(ManifestInvalid):
        open_bundle(layout, list_image(layout, nested))
    with pytest.raises(ManifestInvalid):
        open_bundle(layout, list_image(layout, encode(image_document(layout, nested))))
    (layout.root / "index.json").write_bytes(nested)
    with pytest.raises(LayoutInvalid):
        open_bundle(layout, sha256_bytes(b"unused"))
