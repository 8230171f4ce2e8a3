import json

import pytest

from bundle.digest import sha256_bytes
from bundle.store.oci import IMAGE_MANIFEST_TYPE, REF_NAME, TITLE, BlobDescriptor, ImageManifest, Index, parse_record

DIGEST = sha256_bytes(b"")
OTHER = sha256_bytes(b"other")
DESCRIPTOR = {"mediaType": "application/octet-stream", "digest": DIGEST, "size": 0}


def descriptor(digest: str = DIGEST, ref_name: str | None = None) -> BlobDescriptor:
    annotations = None if ref_name is None else {REF_NAME: ref_name}
    return BlobDescriptor(media_type=IMAGE_MANIFEST_TYPE, digest=digest, size_bytes=0, annotations=annotations)


def test_spelling_on_disk_is_the_specifications() -> None:
    image = ImageManifest(
        schema_version=2,
        media_type=IMAGE_MANIFEST_TYPE,
        artifact_type="a/b",
        config=descriptor(),
        layers=(descriptor(OTHER, "x"),),
    )
    written = json.loads(image.to_json())
    assert written == {
        "schemaVersion": 2,
        "mediaType": IMAGE_MANIFEST_TYPE,
        "artifactType": "a/b",
        "config": {"mediaType": IMAGE_MANIFEST_TYPE, "digest": DIGEST, "size": 0},
        "layers": [
            {"mediaType": IMAGE_MANIFEST_TYPE, "digest": OTHER, "size": 0, "annotations": {REF_NAME: "x"}},
        ],
    }
    assert parse_record(image.to_json(), ImageManifest) == image


def test_index_of_another_tool_survives_rewriting() -> None:
    entry = DESCRIPTOR | {
        "urls": ["https://example.com/blob"],
        "data": "",
        "platform": {"architecture": "amd64", "os": "linux", "os.features": ["win32k"]},
        "artifactType": "a/b",
        "annotations": {TITLE: "file", REF_NAME: "tag"},
    }
    document = {"schemaVersion": 2, "manifests": [entry], "annotations": {"who": "someone"}}
    index = parse_record(json.dumps(document).encode(), Index)
    assert json.loads(index.to_json()) == document
    assert (index.manifests[0].title, index.manifests[0].ref_name) == ("file", "tag")


def test_unknown_properties_are_ignored() -> None:
    assert parse_record(json.dumps(DESCRIPTOR | {"new": 1}).encode(), BlobDescriptor) == BlobDescriptor(
        media_type="application/octet-stream", digest=DIGEST, size_bytes=0
    )


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"digest": "sha256:../../../etc/passwd"}, "digest"),
        ({"digest": DIGEST + "\n"}, "digest"),
        ({"size": -1}, "size"),
        ({"size": 2**53}, "size"),
        ({"size": "0"}, "size"),
        ({"mediaType": None}, "mediaType"),
        ({"annotations": {"a": 1}}, "annotations"),
    ],
)
def test_wrong_properties_are_named(change: dict[str, object], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        parse_record(json.dumps(DESCRIPTOR | change).encode(), BlobDescriptor)


def test_index_entries_are_keyed_by_tag_and_then_by_digest() -> None:
    index = Index(schema_version=2, manifests=())
    index = index.with_manifest(descriptor()).with_manifest(descriptor())
    assert len(index.manifests) == 1
    index = index.with_manifest(descriptor(ref_name="a")).with_manifest(descriptor(ref_name="b"))
    assert [entry.ref_name for entry in index.manifests] == ["", "a", "b"]
    moved = index.with_manifest(descriptor(OTHER, "a"))
    assert [(entry.ref_name, entry.digest) for entry in moved.manifests] == [("", DIGEST), ("b", DIGEST), ("a", OTHER)]
    assert moved.find(OTHER) == descriptor(OTHER, "a")
    assert moved.find(sha256_bytes(b"absent")) is None
    assert [entry.digest for entry in moved.without_manifest(DIGEST).manifests] == [OTHER]
