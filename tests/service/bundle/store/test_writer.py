import itertools
import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from bundle.digest import sha256_bytes
from bundle.errors import BlobNotFound, BundleNotFound, ManifestInvalid
from bundle.manifest import Manifest
from bundle.store.layout import Layout
from bundle.store.oci import BUNDLE_TYPE, MANIFEST_TYPE, NEURON_CONFIG_TYPE, WEIGHTS_TYPE
from bundle.store.reader import open_bundle
from bundle.store.writer import BundleWriter, register_bundle
from tests.bundles.samples import DIGESTS, FILES, add_sample_files, publish_sample, put_chunks, sample_manifest
from tests.tools import require_tool


@pytest.fixture
def writer(layout: Layout) -> BundleWriter:
    return BundleWriter(layout)


def test_published_bundle_is_an_oci_artifact(layout: Layout) -> None:
    digest = publish_sample(layout, ref_name="tiny:v1")
    (entry,) = json.loads((layout.root / "index.json").read_bytes())["manifests"]
    image_bytes = layout.open_blob(digest).read()
    assert entry == {
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "artifactType": BUNDLE_TYPE,
        "digest": digest,
        "size": len(image_bytes),
        "annotations": {"org.opencontainers.image.ref.name": "tiny:v1"},
    }
    image = json.loads(image_bytes)
    assert image["artifactType"] == BUNDLE_TYPE
    assert image["config"]["mediaType"] == MANIFEST_TYPE
    assert layout.open_blob(image["config"]["digest"]).read() == sample_manifest().to_json()
    titles = {layer["annotations"]["org.opencontainers.image.title"]: layer for layer in image["layers"]}
    assert {title: (layer["mediaType"], layer["digest"], layer["size"]) for title, layer in titles.items()} == {
        title: (media_type, sha256_bytes(data), len(data))
        for title, media_type, data in (*FILES, ("manifest.json", MANIFEST_TYPE, sample_manifest().to_json()))
    }


def test_digest_does_not_depend_on_the_order_or_way_of_adding(tmp_path: Path) -> None:
    digests = set()
    for number, files in enumerate(itertools.islice(itertools.permutations(FILES), 0, 120, 17)):
        layout = Layout.create(tmp_path / str(number))
        writer = BundleWriter(layout)
        for title, media_type, data in files:
            path = tmp_path / "file"
            path.write_bytes(data)
            source = (path, data, put_chunks(layout, data, 100))[number % 3]
            writer.add_blob(source, media_type, title)
        digests.add(writer.publish(sample_manifest()))
    assert len(digests) == 1
    assert digests == {publish_sample(Layout.create(tmp_path / "again"), ref_name="any:v1")}


def test_nothing_is_visible_before_publishing(layout: Layout, writer: BundleWriter) -> None:
    add_sample_files(writer)
    assert layout.read_index().manifests == ()
    assert set(layout.list_blobs()) == set(DIGESTS.values())


def test_publishing_twice_lists_once(layout: Layout) -> None:
    assert publish_sample(layout) == publish_sample(layout)
    assert len(layout.read_index().manifests) == 1


def test_tag_moves_to_the_newest(layout: Layout) -> None:
    old = publish_sample(layout, version="1", ref_name="tiny:latest")
    new = publish_sample(layout, version="2", ref_name="tiny:latest")
    assert [(entry.ref_name, entry.digest) for entry in layout.read_index().manifests] == [("tiny:latest", new)]
    with pytest.raises(BundleNotFound):
        open_bundle(layout, old)


@pytest.mark.parametrize("missing", [title for title, _, _ in FILES])
def test_manifest_that_names_what_was_not_added_is_refused(layout: Layout, writer: BundleWriter, missing: str) -> None:
    for title, media_type, data in FILES:
        layout.put_blob(data)
        if title != missing:
            writer.add_blob(data, media_type, title)
    with pytest.raises(BlobNotFound, match=DIGESTS[missing]):
        writer.publish(sample_manifest())
    assert layout.read_index().manifests == ()


def test_blob_deleted_before_publishing_is_noticed(layout: Layout, writer: BundleWriter) -> None:
    add_sample_files(writer)
    layout.delete_blob(DIGESTS["tokenizer.json"])
    with pytest.raises(BlobNotFound, match=DIGESTS["tokenizer.json"]):
        writer.publish(sample_manifest())
    assert layout.read_index().manifests == ()


def test_stored_blob_must_be_in_this_store(tmp_path: Path, writer: BundleWriter) -> None:
    stored = Layout.create(tmp_path / "other").put_blob(b"elsewhere")
    with pytest.raises(BlobNotFound):
        writer.add_blob(stored, WEIGHTS_TYPE, "weights")


def test_files_that_the_manifest_does_not_name_may_come_along(layout: Layout, writer: BundleWriter) -> None:
    add_sample_files(writer)
    added = writer.add_blob(b"{}", NEURON_CONFIG_TYPE, "neuron_config.json")
    bundle = open_bundle(layout, writer.publish(sample_manifest()))
    assert added in bundle.blobs
    described = (added.title, added.media_type, added.digest)
    assert described == ("neuron_config.json", NEURON_CONFIG_TYPE, sha256_bytes(b"{}"))


@pytest.mark.parametrize(
    "title", ["", ".", "..", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", "a\\b", "a\0b", "./a"]
)
def test_title_that_leaves_the_bundle_is_refused(writer: BundleWriter, title: str) -> None:
    with pytest.raises(ManifestInvalid, match="relative path"):
        writer.add_blob(b"data", WEIGHTS_TYPE, title)


def test_the_title_of_the_manifest_is_taken(layout: Layout, writer: BundleWriter) -> None:
    add_sample_files(writer)
    writer.add_blob(b"{}", NEURON_CONFIG_TYPE, "manifest.json")
    with pytest.raises(ManifestInvalid, match=r"'manifest\.json'"):
        writer.publish(sample_manifest())
    assert layout.read_index().manifests == ()


def test_title_names_one_file(writer: BundleWriter) -> None:
    assert writer.add_blob(b"data", WEIGHTS_TYPE, "a") == writer.add_blob(b"data", WEIGHTS_TYPE, "a")
    with pytest.raises(ManifestInvalid, match="'a'"):
        writer.add_blob(b"other data", WEIGHTS_TYPE, "a")


def resize_shards(manifest: Manifest) -> Manifest:
    (model,) = manifest.weight_sets
    shards = tuple(replace(shard, size_bytes=1) for shard in model.shards)
    return replace(manifest, weight_sets=(replace(model, shards=shards),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda manifest: replace(manifest, config={"value": math.nan}), "nan is not", id="no JSON"),
        pytest.param(
            lambda manifest: replace(manifest, config={"value": 2**60}), "exceeds safe", id="no number of JSON"
        ),
        pytest.param(
            lambda one: replace(one, tp_degree=3), "kv_heads_by_rank has 2 entries at tp 3", id="inconsistent"
        ),
        pytest.param(resize_shards, "1 bytes", id="shards of another size"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(
    layout: Layout, writer: BundleWriter, change: Callable[[Manifest], Manifest], message: str
) -> None:
    add_sample_files(writer)
    with pytest.raises(ManifestInvalid, match=message):
        writer.publish(change(sample_manifest()))
    assert layout.read_index().manifests == ()


def copy_blobs(source: Layout, target: Layout, *, but: str = "") -> None:
    for digest in source.list_blobs():
        if digest != but:
            target.ingest_file(source.blob_path(digest))


def test_copied_bundle_is_registered_once_it_is_whole(layout: Layout, tmp_path: Path) -> None:
    digest = publish_sample(layout)
    for number, missing in enumerate([*DIGESTS.values(), digest, sha256_bytes(sample_manifest().to_json())]):
        copy = Layout.create(tmp_path / f"copy-{number}")
        copy_blobs(layout, copy, but=missing)
        with pytest.raises(BlobNotFound, match=missing):
            register_bundle(copy, digest)
        assert copy.read_index().manifests == ()
        copy.ingest_file(layout.blob_path(missing))
        register_bundle(copy, digest)
        assert open_bundle(copy, digest).manifest == sample_manifest()


def run_skopeo(*arguments: str) -> bytes:
    return subprocess.run([require_tool("skopeo"), *arguments], capture_output=True, check=True, timeout=60).stdout


def test_registry_tools_read_and_copy_bundles(layout: Layout, tmp_path: Path) -> None:
    digest = publish_sample(layout, ref_name="tiny:v1")
    source = f"oci:{layout.root}:tiny:v1"
    assert sha256_bytes(run_skopeo("inspect", "--raw", source)) == digest
    run_skopeo("--insecure-policy", "copy", source, f"dir:{tmp_path}/dir")
    run_skopeo("--insecure-policy", "copy", f"dir:{tmp_path}/dir", f"oci:{tmp_path}/copy:tiny:v1")
    bundle = open_bundle(Layout(tmp_path / "copy"), digest)
    assert bundle.manifest == sample_manifest()
    assert bundle.size_bytes == open_bundle(layout, digest).size_bytes
