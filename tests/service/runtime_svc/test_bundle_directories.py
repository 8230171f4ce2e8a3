"""A runtime without a compiler: bundles from layouts in a mounted directory."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import msgspec
import pytest

from bundle.digest import sha256_bytes
from bundle.errors import BlobCorrupt, BlobNotFound, BundleNotFound, LayoutInvalid
from bundle.reference import parse_reference
from bundle.store.layout import Layout
from bundle.store.oci import REF_NAME
from bundle.store.reader import open_bundle
from bundle.store.tags import WrittenTag, write_tags
from tests.bundles.published import publish
from tests.ranks.fakes import expected_tokens
from tests.servers.refusals import refused
from tests.servers.runtime import serve_runtime, tokens_of

FOLLOWING = "--follow-interval=0.05"
#: A runtime that no BundleService helps.
serve = partial(serve_runtime, has_compiler=False)


def tag(layout: Layout, digest: str, name: str) -> None:
    """Names a bundle, as `skopeo copy … oci:LAYOUT:NAME` does."""
    with layout.lock():
        index = layout.read_index()
        entry = index.find(digest)
        assert entry is not None
        named = msgspec.structs.replace(entry, annotations={**(entry.annotations or {}), REF_NAME: name})
        layout.replace_index(index.with_manifest(named))


def add(layout: Layout, name: str, bias: int) -> str:
    digest = publish(layout, bias=bias)
    tag(layout, digest, name)
    return digest


async def test_references_are_tags_of_a_layout(tmp_path: Path) -> None:
    layout = Layout.create(tmp_path / "mounted")
    first, second, third = (add(layout, f"story-v{version}", version) for version in (1, 2, 10))
    tag(layout, second, "story-prod")
    # Also the name of another bundle, whose newest version comes before the alias.
    other = add(layout, "story-prod-v9", 9)
    async with serve(tmp_path, f"--bundles={layout.root}") as served:
        library = served.server.deployments.library
        wanted = {
            "story:v1": (first, "story:v1"),
            "story:v2": (second, "story:v2"),
            "story@prod": (second, "story:v2"),
            "story": (third, "story:v10"),
            "story-prod": (other, "story-prod:v9"),
            first: (first, ""),
        }
        for number, (ref, found) in enumerate(wanted.items()):
            resolved = await library.resolve(ref)
            assert (resolved.ref, resolved.digest, resolved.version) == (ref, *found), number
        layout.replace_index(layout.read_index().without_tag("story-prod-v9"))
        assert (await library.resolve("story-prod")).digest == second
        await served.load("story:v2")
        assert tokens_of(await served.generate([5])) == expected_tokens([5], 5, bias=2)
        caught = await refused(served.load("story:v3", "e"), "NOT_FOUND", "BUNDLE_NOT_FOUND")
        assert "no compiler to ask" in caught.message


async def test_a_directory_of_layouts(tmp_path: Path) -> None:
    bundles = tmp_path / "bundles"
    bundles.mkdir()
    (bundles / "lost+found").mkdir()
    async with serve(tmp_path, f"--bundles={bundles}") as served:
        await refused(served.load("other"), "NOT_FOUND", "BUNDLE_NOT_FOUND")
        add(Layout.create(bundles / "story"), "story-v1", 1)
        add(Layout.create(bundles / "other"), "other", 3)
        await served.load("other")
        assert tokens_of(await served.generate([5])) == expected_tokens([5], 5, bias=3)


async def test_the_directory_is_only_read(tmp_path: Path) -> None:
    layout = Layout.create(tmp_path / "mounted")
    add(layout, "story-v1", 1)
    before = {path: path.stat().st_mtime_ns for path in layout.root.rglob("*")}
    async with serve(tmp_path, f"--bundles={layout.root}") as served:
        await served.load("story:v1")
        await served.generate([5])
    assert {path: path.stat().st_mtime_ns for path in layout.root.rglob("*")} == before
    assert list(Layout(tmp_path / "cache/blobs").list_blobs()) == []


async def test_a_moved_tag_is_followed(tmp_path: Path) -> None:
    layout = Layout.create(tmp_path / "mounted")
    add(layout, "story-prod", 1)
    async with serve(tmp_path, f"--bundles={layout.root}", FOLLOWING) as served:
        await served.load("story@prod", follow_alias=True)
        digest = add(layout, "story-prod", 2)
        await served.wait_for(lambda one: one.roles[0].weights_digest == digest)
        assert tokens_of(await served.generate([5])) == expected_tokens([5], 5, bias=2)


async def test_deployments_come_back_without_a_compiler(tmp_path: Path) -> None:
    layout = Layout.create(tmp_path / "mounted")
    add(layout, "story-v1", 4)
    async with serve(tmp_path, f"--bundles={layout.root}") as served:
        await served.load("story:v1")
        await served.server.drain()
    async with serve(tmp_path, f"--bundles={layout.root}") as served:
        await served.wait_for_state("READY")
        assert tokens_of(await served.generate([5])) == expected_tokens([5], 5, bias=4)


async def test_beside_a_compiler_the_directory_is_asked_first(tmp_path: Path) -> None:
    layout = Layout.create(tmp_path / "mounted")
    add(layout, "story", 7)
    async with serve_runtime(tmp_path, f"--bundles={layout.root}") as served:
        served.publish("story", bias=1)
        served.publish("other", bias=2)
        await served.load("story")
        assert tokens_of(await served.generate([5])) == expected_tokens([5], 5, bias=7)
        assert served.bundles.lookups == []
        await served.load("other", "e")
        assert served.bundles.lookups == ["other"]
        assert tokens_of(await served.generate([5], deployment_id="e")) == expected_tokens([5], 5, bias=2)


async def test_the_store_of_a_compiler_is_a_directory_of_bundles(tmp_path: Path) -> None:
    layout = Layout.create(tmp_path / "store")
    digest = publish(layout, bias=3)
    tags = [WrittenTag(parse_reference(ref), digest, 1, None) for ref in ("story:v1", "story@prod")]
    write_tags(layout, lambda: tags)
    async with serve(tmp_path, f"--bundles={layout.root}") as served:
        await served.load("story@prod", follow_alias=True)
        assert tokens_of(await served.generate([5])) == expected_tokens([5], 5, bias=3)


def unpack(layout: Layout, digest: str, folder: Path) -> Path:
    """Writes the layers of a bundle as files, by their titles, as `oras pull` and volumes of artifacts do."""
    for layer in open_bundle(layout, digest).image.layers:
        (folder / layer.title).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(layout.blob_path(layer.digest), folder / layer.title)
    return folder


@pytest.fixture
def made(tmp_path: Path) -> Layout:
    """Where bundles are made before they are unpacked."""
    return Layout.create(tmp_path / "made")


async def test_an_unpacked_bundle_is_served_by_the_name_of_its_folder(tmp_path: Path, made: Layout) -> None:
    folder = unpack(made, publish(made, bias=3), tmp_path / "bundles" / "story")
    digest = sha256_bytes((folder / "manifest.json").read_bytes())
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    # The folder alone, and a directory of such.
    for number, directory in enumerate((folder, folder.parent)):
        async with serve(tmp_path / str(number), f"--bundles={directory}") as served:
            deployment = (await served.load("story"))[-1].deployment
            assert deployment.roles[0].bundle_digest == digest
            assert tokens_of(await served.generate([5])) == expected_tokens([5], 5, bias=3)
            await served.server.drain()
        async with serve(tmp_path / str(number), f"--bundles={directory}") as served:
            await served.wait_for_state("READY")
            await served.load(digest, "by-digest")
            await refused(served.load("other", "e"), "NOT_FOUND", "BUNDLE_NOT_FOUND")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


async def test_names_of_folders_are_tags(tmp_path: Path, made: Layout) -> None:
    bundles = tmp_path / "bundles"
    for name, bias in (("story-v1", 1), ("story-v2", 2), ("story-prod", 1)):
        unpack(made, publish(made, bias=bias), bundles / name)
    async with serve(tmp_path, f"--bundles={bundles}", FOLLOWING) as served:
        for ref, bias in (("story", 2), ("story:v1", 1)):
            await served.load(ref, ref[-1])
            assert tokens_of(await served.generate([5], deployment_id=ref[-1])) == expected_tokens([5], 5, bias=bias)
        await served.load("story@prod", follow_alias=True)
        (bundles / "story-prod").rename(tmp_path / "old")
        digest = sha256_bytes((bundles / "story-v2" / "manifest.json").read_bytes())
        # Whole at once: the runtime might read what is half there.
        unpack(made, publish(made, bias=2), tmp_path / "new")
        (tmp_path / "new").rename(bundles / "story-prod")
        await served.wait_for(lambda one: one.roles[0].weights_digest == digest)
        assert tokens_of(await served.generate([5])) == expected_tokens([5], 5, bias=2)


async def test_files_of_an_unpacked_bundle_are_verified(tmp_path: Path, made: Layout) -> None:
    bundle = open_bundle(made, publish(made, bias=1))
    (shard,) = bundle.manifest.shards()
    folder = unpack(made, bundle.digest, tmp_path / "bundles" / "story")
    weights = folder / "weights" / "tp0_sharded_checkpoint.safetensors"
    weights.write_text("7")
    async with serve(tmp_path, f"--bundles={folder.parent}") as served:
        caught = await refused(served.load("story"), "NOT_FOUND", "BLOB_NOT_FOUND")
        assert f"blob {shard.blob} is not among the files of {folder.name}: " in caught.message
        weights.write_text("1")
        await served.load("story")
        # After it was opened and before ranks map it, as at a restart of ranks.
        library = served.server.deployments.library
        bundle = await library.fetch(await library.resolve("story"), lambda _done, _total: None)
        weights.write_text("7")
        with pytest.raises(BlobCorrupt, match=str(shard.blob)):
            await library.verify(bundle)
        weights.unlink()
        with pytest.raises(BlobNotFound, match=str(shard.blob)):
            await library.verify(bundle)


@pytest.mark.parametrize(
    ("manifest", "code", "reason"),
    [
        (b'{"schemaVersion":2,"layers":[]}', "FAILED_PRECONDITION", "MANIFEST_INVALID"),
        (b'{"abi_version":2}', "FAILED_PRECONDITION", "ABI_UNSUPPORTED"),
        (None, "NOT_FOUND", "BUNDLE_NOT_FOUND"),
    ],
)
async def test_a_folder_that_is_no_bundle_is_named(
    tmp_path: Path, manifest: bytes | None, code: str, reason: str
) -> None:
    """A folder of `skopeo copy … dir:` has another `manifest.json`; a link is not followed."""
    folder = tmp_path / "bundles" / "story"
    folder.mkdir(parents=True)
    (tmp_path / "elsewhere").write_bytes(b"{}")
    if manifest is None:
        (folder / "manifest.json").symlink_to(tmp_path / "elsewhere")
    else:
        (folder / "manifest.json").write_bytes(manifest)
    async with serve(tmp_path, f"--bundles={folder.parent}") as served:
        await refused(served.load("story"), code, reason)


async def test_a_bundle_that_vanishes_is_named(tmp_path: Path) -> None:
    layout = Layout.create(tmp_path / "mounted")
    digest = add(layout, "story", 7)
    async with serve(tmp_path, f"--bundles={layout.root}") as served:
        library = served.server.deployments.library
        resolved = await library.resolve("story")
        layout.replace_index(layout.read_index().without_manifest(digest))
        with pytest.raises(BundleNotFound, match="gone from the directories of bundles"):
            await library.fetch(resolved, lambda _done, _total: None)


async def test_a_directory_that_does_not_exist_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(LayoutInvalid, match="absent is no OCI image layout: no directory"):
        async with serve(tmp_path, f"--bundles={tmp_path / 'absent'}"):
            pass
