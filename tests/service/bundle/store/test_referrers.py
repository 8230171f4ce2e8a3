import json
import subprocess
from pathlib import Path

import pytest

from bundle.digest import sha256_bytes
from bundle.errors import BlobCorrupt, BundleNotFound, DigestInvalid, LayoutInvalid, ManifestInvalid
from bundle.store.layout import Layout
from bundle.store.oci import IMAGE_MANIFEST_TYPE, ImageManifest, parse_record
from bundle.store.reader import open_bundle
from bundle.store.referrers import add_referrer, fallback_tag, list_referrer_files, list_referrers, read_referrer
from bundle.store.removal import Needs, collect_garbage, remove_bundle
from tests.bundles.samples import list_manifest, publish_sample
from tests.tools import require_tool

TIMINGS = "application/vnd.kiln.timings.v1"
SIGNATURE = "application/vnd.kiln.signature.v1"


@pytest.fixture
def bundle(layout: Layout) -> str:
    return publish_sample(layout, ref_name="tiny:v1")


def attach(layout: Layout, subject: str, data: bytes = b'{"s":1}', artifact_type: str = TIMINGS) -> str:
    return add_referrer(layout, subject, artifact_type, "application/json", data, title="timings.json")


def test_referrer_is_an_oci_artifact_with_a_subject(layout: Layout, bundle: str) -> None:
    digest = attach(layout, bundle)
    image = json.loads(layout.open_blob(digest).read())
    empty = sha256_bytes(b"{}")
    assert image == {
        "schemaVersion": 2,
        "mediaType": IMAGE_MANIFEST_TYPE,
        "artifactType": TIMINGS,
        "config": {"mediaType": "application/vnd.oci.empty.v1+json", "digest": empty, "size": 2},
        "layers": [
            {
                "mediaType": "application/json",
                "digest": sha256_bytes(b'{"s":1}'),
                "size": 7,
                "annotations": {"org.opencontainers.image.title": "timings.json"},
            }
        ],
        "subject": {
            "mediaType": IMAGE_MANIFEST_TYPE,
            "digest": bundle,
            "size": open_bundle(layout, bundle).descriptor.size_bytes,
        },
    }
    assert layout.open_blob(empty).read() == b"{}"
    assert read_referrer(layout, digest) == b'{"s":1}'


def test_referrers_are_listed_by_kind_and_change_no_bundle(layout: Layout, bundle: str) -> None:
    assert list_referrers(layout, bundle) == ()
    before = open_bundle(layout, bundle).blobs
    timings, signature = attach(layout, bundle), attach(layout, bundle, b"s", SIGNATURE)
    assert attach(layout, bundle) == timings, "twice is once"
    assert open_bundle(layout, bundle).blobs == before
    listed = {one.digest: one.artifact_type for one in list_referrers(layout, bundle)}
    assert listed == {timings: TIMINGS, signature: SIGNATURE}
    assert [one.digest for one in list_referrers(layout, bundle, SIGNATURE)] == [signature]
    assert list_referrers(layout, timings) == ()
    assert list_referrers(layout, sha256_bytes(b"absent")) == ()


def test_files_of_referrers_are_listed_and_what_is_broken_is_left_out(layout: Layout, bundle: str) -> None:
    assert list_referrer_files(layout, bundle) == ()
    attach(layout, bundle)
    signature = attach(layout, bundle, b"s", SIGNATURE)
    files = {(one.digest, one.size_bytes, one.media_type, one.title) for one in list_referrer_files(layout, bundle)}
    timings = (sha256_bytes(b'{"s":1}'), 7, "application/json", "timings.json")
    assert files == {timings, (sha256_bytes(b"s"), 1, "application/json", "timings.json")}
    layout.blob_path(signature).write_bytes(b"broken")
    assert [one.digest for one in list_referrer_files(layout, bundle)] == [timings[0]]
    (listing,) = [one for one in layout.read_index().manifests if one.ref_name == fallback_tag(bundle)]
    layout.blob_path(listing.digest).unlink()
    assert list_referrer_files(layout, bundle) == ()


def test_referrers_stand_in_the_index_without_tag_and_in_the_fallback(layout: Layout, bundle: str) -> None:
    """Tools of OCI 1.1 look into the index of a layout; older tools know only tags."""
    first, second = attach(layout, bundle), attach(layout, bundle, b"s", SIGNATURE)
    index = json.loads((layout.root / "index.json").read_bytes())
    untagged = {entry["digest"] for entry in index["manifests"] if "annotations" not in entry}
    assert untagged == {first, second}
    (listing,) = [
        entry
        for entry in index["manifests"]
        if entry.get("annotations", {}).get("org.opencontainers.image.ref.name") == fallback_tag(bundle)
    ]
    assert fallback_tag(bundle) == bundle.replace(":", "-")
    assert listing["mediaType"] == "application/vnd.oci.image.index.v1+json"
    listed = json.loads(layout.open_blob(listing["digest"]).read())["manifests"]
    assert {(one["digest"], one["artifactType"]) for one in listed} == {(first, TIMINGS), (second, SIGNATURE)}


def test_referrers_of_other_tools_are_found(layout: Layout, bundle: str) -> None:
    """Without fallback, and with a type that only the config tells."""
    subject = open_bundle(layout, bundle).descriptor
    config = layout.put_blob(b"config")
    document = {
        "schemaVersion": 2,
        "mediaType": IMAGE_MANIFEST_TYPE,
        "config": {"mediaType": "application/vnd.other", "digest": config.digest, "size": 6},
        "layers": [],
        "subject": {"mediaType": subject.media_type, "digest": subject.digest, "size": subject.size_bytes},
    }
    entry = list_manifest(layout, layout.put_blob(json.dumps(document).encode()))
    ours = attach(layout, bundle)
    assert {one.digest for one in list_referrers(layout, bundle)} == {entry.digest, ours}
    assert [one.digest for one in list_referrers(layout, bundle, "application/vnd.other")] == [entry.digest]


def test_a_bundle_takes_its_referrers_along(layout: Layout, bundle: str) -> None:
    other = publish_sample(layout, version="2")
    kept = attach(layout, other, b"kept")
    signature = attach(layout, attach(layout, bundle), b"signed", SIGNATURE)
    blobs = set(layout.list_blobs())
    remove_bundle(layout, bundle)
    assert {entry.digest for entry in layout.read_index().manifests if not entry.ref_name} == {other, kept}
    assert {entry.ref_name for entry in layout.read_index().manifests} == {"", fallback_tag(other)}
    assert signature in blobs
    assert not layout.has(signature)
    assert read_referrer(layout, kept) == b"kept"


def test_a_collection_keeps_the_referrers_of_what_it_keeps(layout: Layout) -> None:
    named, unnamed = (publish_sample(layout, version=version) for version in "12")
    kept, gone = attach(layout, named, b"1"), attach(layout, unnamed, b"2")
    collected = collect_garbage(layout, lambda: Needs(bundles=frozenset({named})))
    assert collected.bundle_count == 1
    assert read_referrer(layout, kept) == b"1"
    assert not layout.has(gone)
    assert [one.digest for one in list_referrers(layout, named)] == [kept]


def test_what_is_not_listed_has_no_referrers(layout: Layout, bundle: str) -> None:
    with pytest.raises(BundleNotFound, match=sha256_bytes(b"absent")):
        attach(layout, sha256_bytes(b"absent"))
    for call in (lambda: attach(layout, "tiny:v1"), lambda: list_referrers(layout, "tiny:v1")):
        with pytest.raises(DigestInvalid):
            call()
    with pytest.raises(ManifestInvalid, match="relative path"):
        add_referrer(layout, bundle, TIMINGS, "application/json", b"", title="../timings.json")
    collect_garbage(layout, Needs)
    assert set(layout.list_blobs()) == {blob.digest for blob in open_bundle(layout, bundle).blobs}


def test_broken_referrers_are_named(layout: Layout, bundle: str) -> None:
    digest = attach(layout, bundle)
    layer = parse_record(layout.open_blob(digest).read(), ImageManifest).layers[0].digest
    for corrupt in (layer, digest):
        layout.blob_path(corrupt).chmod(0o644)
        layout.blob_path(corrupt).write_bytes(b"[]")
        with pytest.raises(BlobCorrupt, match=corrupt):
            read_referrer(layout, digest)
    with pytest.raises(LayoutInvalid, match=digest):
        list_referrers(layout, bundle)
    with pytest.raises(ManifestInvalid, match="layers; accepted: one"):
        read_referrer(layout, bundle)
    with pytest.raises(ManifestInvalid):
        read_referrer(layout, layout.put_blob(b"[]").digest)


def test_tools_that_know_only_tags_copy_referrers(layout: Layout, bundle: str, tmp_path: Path) -> None:
    digest = attach(layout, bundle)
    tag = fallback_tag(bundle)
    command = [require_tool("skopeo"), "--insecure-policy", "copy", "--all"]
    subprocess.run([*command, f"oci:{layout.root}:{tag}", f"dir:{tmp_path}/dir"], check=True, timeout=60)
    subprocess.run([*command, f"dir:{tmp_path}/dir", f"oci:{tmp_path}/copy:{tag}"], check=True, timeout=60)
    assert read_referrer(Layout(tmp_path / "copy"), digest) == b'{"s":1}'
