import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bundle.digest import sha256_bytes
from bundle.errors import (
    AbiUnsupported,
    BlobCorrupt,
    BlobNotFound,
    BundleError,
    BundleNotFound,
    DigestInvalid,
    LayoutInvalid,
    ManifestInvalid,
)
from bundle.layout import Layout
from bundle.oci import BUNDLE_TYPE, IMAGE_MANIFEST_TYPE, INDEX_TYPE, MANIFEST_TYPE, TITLE
from bundle.reader import MAX_IMAGE_MANIFEST_BYTES, open_bundle
from bundle.verification import BlobVerifier
from tests.bundle.opened_files import record_opened_files
from tests.bundle.samples import DIGESTS, FILES, Contents, publish_sample, sample_manifest, unlist_manifest

Json = dict[str, object]


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout.create(tmp_path / "layout")


def flip_byte(path: Path, position: int = -1) -> None:
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


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
    assert {blob.title for blob in bundle.blobs} == {title for title, _, _ in FILES} | {""}
    assert bundle.size_bytes == sum(layout.stored(digest).size_bytes for digest in layout.list_blobs())


@pytest.mark.parametrize("contents", ["executables", "weights"])
def test_bundle_of_one_kind_of_contents_comes_back(layout: Layout, contents: Contents) -> None:
    bundle = open_bundle(layout, publish_sample(layout, contents=contents))
    assert bundle.manifest == sample_manifest(contents=contents)
    assert {blob.title.partition("/")[0] for blob in bundle.blobs} == {contents, "tokenizer.json", ""}
    bundle.verify(BlobVerifier(None))


def test_blob_that_two_layers_share_counts_once(layout: Layout) -> None:
    document = image_document(layout, sample_manifest().to_json())
    layers = document["layers"]
    assert isinstance(layers, list)
    layers.append(layers[-1] | {"annotations": {TITLE: "second name"}})
    bundle = open_bundle(layout, list_image(layout, encode(document)))
    assert bundle.size_bytes == sum(layout.stored(digest).size_bytes for digest in layout.list_blobs())


def test_whole_bundle_verifies_with_its_size_as_progress(layout: Layout, tmp_path: Path) -> None:
    bundle = open_bundle(layout, publish_sample(layout))
    verifier = BlobVerifier(tmp_path / "cache")
    for _ in range(2):
        reported: list[int] = []
        bundle.verify(verifier, reported.append)
        assert sum(reported) == bundle.size_bytes


@pytest.mark.parametrize(("title", "position"), [(FILES[0][0], 0), (FILES[2][0], 5000), (FILES[4][0], -1)])
def test_flipped_byte_names_digest_and_title(layout: Layout, tmp_path: Path, title: str, position: int) -> None:
    bundle = open_bundle(layout, publish_sample(layout))
    bundle.verify(BlobVerifier(tmp_path / "cache"))
    path = bundle.blob_path(DIGESTS[title])
    flip_byte(path, position)
    with pytest.raises(BlobCorrupt) as caught:
        bundle.verify(BlobVerifier(tmp_path / "cache"))
    assert caught.value.metadata == {
        "digest": DIGESTS[title],
        "title": title,
        "actual": sha256_bytes(path.read_bytes()),
    }
    assert title in str(caught.value)
    assert DIGESTS[title] in str(caught.value)


def test_flipped_byte_of_a_manifest_is_found_on_opening(layout: Layout) -> None:
    digest = publish_sample(layout)
    for manifest in (sha256_bytes(sample_manifest().to_json()), digest):
        flip_byte(layout.blob_path(manifest))
        with pytest.raises(BlobCorrupt, match=manifest):
            open_bundle(layout, digest)


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
    for access in (lambda: open_bundle(layout, digest), lambda: bundle.verify(BlobVerifier(None))):
        with pytest.raises(BlobNotFound, match=DIGESTS["tokenizer.json"]):
            access()


def test_unlisted_bundle_is_not_found(layout: Layout) -> None:
    digest = publish_sample(layout)
    unlist_manifest(layout, digest)
    with pytest.raises(BundleNotFound, match=digest):
        open_bundle(layout, digest)
    with pytest.raises(DigestInvalid):
        open_bundle(layout, "tiny:v1")


def change_layers(document: Json, change: Callable[[list[Json]], object]) -> None:
    layers = document["layers"]
    assert isinstance(layers, list)
    change(layers)


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
        (lambda image: change_layers(image, lambda layers: layers.pop(0)), "is no layer"),
        (lambda image: change_layers(image, lambda layers: layers[0].pop("annotations")), "layer title ''"),
        (lambda image: change_layers(image, lambda layers: layers.append(layers[0])), "same title"),
        (
            lambda image: change_layers(image, lambda layers: layers[0].update(annotations={TITLE: "../../x"})),
            "layer title '../../x'",
        ),
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


# Anything that JSON can say, and what a hostile writer would put where a path or number is expected.
ODD_VALUES = st.sampled_from(
    ["", "..", "../../../etc/passwd", "sha256:../../../etc/passwd", "sha256:" + "0" * 64, "\0", -1, 2**63, 1e308, None]
)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | ODD_VALUES,
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=6,
)


def mutate(draw: st.DrawFn, node: object) -> object:
    """Changes one place of a JSON document: replaces, removes or adds something there."""
    if isinstance(node, list):
        changed = mutate(draw, dict(enumerate(node)))
        return list(changed.values()) if isinstance(changed, dict) else changed
    if not isinstance(node, dict) or not node or draw(st.integers(0, 5)) == 0:
        return draw(JSON_VALUES)
    key = draw(st.sampled_from(list(node)))
    match draw(st.integers(0, 9)):
        case 0:
            return {name: value for name, value in node.items() if name != key}
        case 1:
            return node | {draw(st.text(max_size=8)): draw(JSON_VALUES | st.just(node[key]))}
        case _:
            return node | {key: mutate(draw, node[key])}


@st.composite
def mutations(draw: st.DrawFn, document: object) -> bytes:
    for _ in range(draw(st.integers(1, 3))):
        document = mutate(draw, document)
    data = json.dumps(document).encode()
    if draw(st.integers(0, 9)) == 0:
        position = draw(st.integers(0, len(data)))
        data = data[:position] + draw(st.binary(max_size=4)) + data[position + draw(st.integers(0, 4)) :]
    return data


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    """A layout that examples of one test overwrite in turn."""
    layout = Layout.create(tmp_path_factory.mktemp("fuzzed"))
    publish_sample(layout)
    return layout


def assert_opens_or_is_refused(layout: Layout, digest: str) -> None:
    with record_opened_files() as opened, suppress(BundleError):
        assert open_bundle(Layout(layout.root), digest).digest == digest
    assert opened
    assert all(file.path.parent in {layout.root, layout.root / "blobs" / "sha256"} for file in opened)


IMAGE_DIGEST = sha256_bytes(b"unused")
INDEX_DOCUMENT = {
    "schemaVersion": 2,
    "mediaType": INDEX_TYPE,
    "manifests": [
        {
            "mediaType": IMAGE_MANIFEST_TYPE,
            "digest": IMAGE_DIGEST,
            "size": 1,
            "artifactType": BUNDLE_TYPE,
            "annotations": {"org.opencontainers.image.ref.name": "tiny:v1"},
            "platform": {"os": "linux", "architecture": "amd64"},
        }
    ],
}


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=64) | mutations(INDEX_DOCUMENT), digest=st.sampled_from([IMAGE_DIGEST, ""]) | st.text())
def test_any_index_opens_or_is_refused_by_name(fuzzed: Layout, data: bytes, digest: str) -> None:
    (fuzzed.root / "index.json").write_bytes(data)
    assert_opens_or_is_refused(fuzzed, digest)


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=64) | mutations({"imageLayoutVersion": "1.0.0"}))
def test_any_layout_marker_opens_or_is_refused_by_name(fuzzed: Layout, data: bytes) -> None:
    marker = fuzzed.root / "oci-layout"
    whole = marker.read_bytes()
    marker.write_bytes(data)
    try:
        assert_opens_or_is_refused(fuzzed, IMAGE_DIGEST)
    finally:
        marker.write_bytes(whole)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_image_manifest_opens_or_is_refused_by_name(fuzzed: Layout, data: st.DataObject) -> None:
    document = image_document(fuzzed, sample_manifest().to_json())
    image = data.draw(st.binary(max_size=64) | mutations(document))
    assert_opens_or_is_refused(fuzzed, list_image(fuzzed, image))


@settings(max_examples=300, deadline=None)
@given(manifest=st.binary(max_size=64) | mutations(json.loads(sample_manifest().to_json())))
def test_any_manifest_opens_or_is_refused_by_name(fuzzed: Layout, manifest: bytes) -> None:
    assert_opens_or_is_refused(fuzzed, list_image(fuzzed, encode(image_document(fuzzed, manifest))))


def test_deeply_nested_documents_are_refused_by_name(layout: Layout) -> None:
    nested = b'{"config":' + b"[" * 100_000
    with pytest.raises(ManifestInvalid):
        open_bundle(layout, list_image(layout, nested))
    with pytest.raises(ManifestInvalid):
        open_bundle(layout, list_image(layout, encode(image_document(layout, nested))))
    (layout.root / "index.json").write_bytes(nested)
    with pytest.raises(LayoutInvalid):
        open_bundle(layout, IMAGE_DIGEST)
