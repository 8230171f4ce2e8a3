import hashlib
from pathlib import Path
from typing import Any

import pytest
from kiln.bundle.v1 import bundle_pb2 as pb

from bundle.manifest_parser import parse_manifest
from bundle.store.layout import Layout
from bundle.store.oci import MANIFEST_TYPE
from tests.bundles.samples import FILES, OTHER_GRAPHS, publish_sample
from tests.servers.refusals import refusal, refused
from tests.servers.running_compiler import Client, DirectedRunner

MISSING = "sha256:" + "0" * 64


async def publish(client: Client, runner: DirectedRunner, name: str, version: str = "1") -> str:
    """Compiles a bundle whose content depends on `version`; returns its digest."""
    runner.bundle_version = version
    runner.is_open.set()
    return (await client.build(name=name, salt=version)).digest


async def get(client: Client, ref: str) -> pb.Bundle:
    response: pb.GetBundleResponse = await client.bundles.GetBundle(pb.GetBundleRequest(ref=ref))
    return response.bundle


async def set_alias(client: Client, ref: str, alias: str, **fields: Any) -> pb.Alias:
    response: pb.SetAliasResponse = await client.bundles.SetAlias(pb.SetAliasRequest(ref=ref, alias=alias, **fields))
    return response.alias


async def delete(client: Client, ref: str) -> pb.DeleteBundleResponse:
    response: pb.DeleteBundleResponse = await client.bundles.DeleteBundle(pb.DeleteBundleRequest(ref=ref))
    return response


async def delete_alias(client: Client, alias: str, **fields: Any) -> None:
    await client.bundles.DeleteAlias(pb.DeleteAliasRequest(name="a", alias=alias, **fields))


async def read(client: Client, digest: str, offset_bytes: int = 0) -> list[bytes]:
    request = pb.ReadBlobRequest(digest=digest, offset_bytes=offset_bytes)
    return [response.data async for response in client.bundles.ReadBlob(request)]


class TestGet:
    async def test_a_bundle_is_described_whole(self, client: Client, runner: DirectedRunner) -> None:
        digest = await publish(client, runner, "a")
        bundle = await get(client, "a")
        assert (bundle.name, bundle.version, bundle.digest) == ("a", 1, digest)
        assert bundle.create_time.ToNanoseconds() > 0
        manifest = parse_manifest(bundle.manifest_json)
        assert bundle.graph_abi_digest == manifest.graph_abi_digest
        titles = {blob.title: blob for blob in bundle.blobs if blob.title}
        assert set(titles) == {title for title, _, _ in FILES} | {"manifest.json"}
        config, layer = [blob for blob in bundle.blobs if blob.media_type == MANIFEST_TYPE]
        assert config.digest == layer.digest == "sha256:" + hashlib.sha256(bundle.manifest_json).hexdigest()
        sizes = {blob.digest: blob.size_bytes for blob in bundle.blobs}
        assert bundle.size_bytes == sum(sizes.values())

    async def test_every_kind_of_reference(self, client: Client, runner: DirectedRunner) -> None:
        first, second = [await publish(client, runner, "a", version) for version in "12"]
        await set_alias(client, "a:v1", "prod")
        found = {ref: (await get(client, ref)).version for ref in ("a", "a:v1", "a:v2", "a@prod", first, second)}
        assert found == {"a": 2, "a:v1": 1, "a:v2": 2, "a@prod": 1, first: 1, second: 2}
        assert (await get(client, "a@prod")).aliases == ["prod"]

    async def test_a_bundle_without_a_version(self, client: Client, home: Path) -> None:
        digest = publish_sample(Layout(home / "store"))
        bundle = await get(client, digest)
        assert (bundle.name, bundle.version, bundle.digest) == ("", 0, digest)

    async def test_what_is_not_there_and_what_is_no_reference(self, client: Client) -> None:
        for ref in ("a", "a:v1", "a@prod", MISSING):
            await refused(get(client, ref), "NOT_FOUND", "BUNDLE_NOT_FOUND", ref=ref)
        for ref in ("", "A", "a:1", "a@v1", "sha256:00", "a:v0"):
            await refused(get(client, ref), "INVALID_ARGUMENT", "REF_INVALID")


class TestList:
    async def test_pages_by_name_then_newest_first(self, client: Client, runner: DirectedRunner) -> None:
        for name, version in ("b1", "a1", "a2"):
            await publish(client, runner, name, version)
        listed: list[tuple[str, int]] = []
        token = ""
        while True:
            page = await client.bundles.ListBundles(pb.ListBundlesRequest(page_size=2, page_token=token))
            listed += [(bundle.name, bundle.version) for bundle in page.bundles]
            if not (token := page.next_page_token):
                break
        assert listed == [("a", 2), ("a", 1), ("b", 1)]
        only = await client.bundles.ListBundles(pb.ListBundlesRequest(name="b"))
        assert [bundle.name for bundle in only.bundles] == ["b"]
        assert not only.bundles[0].manifest_json
        foreign = client.bundles.ListBundles(pb.ListBundlesRequest(page_token="!"))
        await refused(foreign, "INVALID_ARGUMENT", "PAGE_TOKEN_INVALID")


class TestReadBlob:
    async def test_bytes_come_in_pieces_of_a_mebibyte(self, client: Client, home: Path) -> None:
        data = bytes(range(256)) * 9000
        digest = Layout(home / "store").put_blob(data).digest
        pieces = await read(client, digest)
        assert b"".join(pieces) == data
        assert [len(piece) for piece in pieces] == [1 << 20, 1 << 20, len(data) - (2 << 20)]
        assert b"".join(await read(client, digest, 1_500_000)) == data[1_500_000:]
        assert await read(client, digest, len(data)) == []

    async def test_what_cannot_be_read(self, client: Client, home: Path) -> None:
        digest = Layout(home / "store").put_blob(b"data").digest
        for offset_bytes in (-1, 5):
            how = await refused(read(client, digest, offset_bytes), "INVALID_ARGUMENT", "OFFSET_INVALID")
            assert how.fields == {"offset_bytes": f"got {offset_bytes}; accepted: 0 to 4"}
        await refused(read(client, MISSING), "NOT_FOUND", "BLOB_NOT_FOUND")
        for invalid in ("", "sha256:1", "../../etc/passwd", "sha256:" + "A" * 64):
            await refused(read(client, invalid), "INVALID_ARGUMENT", "DIGEST_INVALID")


@pytest.mark.parametrize("how", ["removed", "linked"])
async def test_a_lost_blob_is_lost_data(client: Client, runner: DirectedRunner, home: Path, how: str) -> None:
    digest = await publish(client, runner, "a")
    lost = (await get(client, digest)).blobs[-1].digest
    path = Layout(home / "store").blob_path(lost)
    path.rename(home / "elsewhere")
    if how == "linked":
        path.symlink_to(home / "elsewhere")
    for ref in ("a", digest):
        await refused(get(client, ref), "DATA_LOSS", "BLOB_MISSING", digest=lost, bundle=digest)
    assert (await refusal(read(client, lost))).reason == "BLOB_NOT_FOUND"


async def test_a_deleted_version_takes_what_no_other_version_names(
    client: Client, runner: DirectedRunner, home: Path
) -> None:
    digest = await publish(client, runner, "a")
    await publish(client, runner, "b")
    newer = await publish(client, runner, "a", "2")
    blobs = {blob.digest: blob.size_bytes for blob in (await get(client, newer)).blobs}
    freed = await delete(client, "a:v1")
    assert (freed.deleted_blob_count, freed.deleted_size_bytes, (await get(client, digest)).name) == (0, 0, "b")
    assert (await delete(client, "b:v1")).deleted_blob_count == 2, "others are shared"
    assert (await refusal(get(client, digest))).reason == "BUNDLE_NOT_FOUND"
    for blob in blobs:
        assert await read(client, blob)
    freed = await delete(client, "a:v2")
    assert (freed.deleted_blob_count, freed.deleted_size_bytes) == (len(blobs), sum(blobs.values()))
    layout = Layout(home / "store")
    assert list(layout.list_blobs()) == []
    assert layout.read_index().manifests == ()
    num_jobs = len(runner.jobs)
    await publish(client, runner, "a", "2")
    assert len(runner.jobs) == num_jobs + 1, "it is built again"
    assert (await get(client, "a")).version == 3


async def test_what_cannot_be_deleted(client: Client, runner: DirectedRunner) -> None:
    await publish(client, runner, "a")
    await set_alias(client, "a", "prod")
    await refused(delete(client, "a:v1"), "FAILED_PRECONDITION", "BUNDLE_IN_USE", ref="a:v1", aliases="prod")
    await refused(delete(client, "a:v2"), "NOT_FOUND", "BUNDLE_NOT_FOUND")
    await refused(delete(client, "a"), "INVALID_ARGUMENT", "REF_INVALID")


class TestAliases:
    async def test_an_alias_is_made_moved_and_removed_by_who_has_its_etag(
        self, client: Client, runner: DirectedRunner
    ) -> None:
        for version in "12":
            await publish(client, runner, "a", version)
        made = await set_alias(client, "a:v1", "prod", etag="")
        moved = await set_alias(client, "a:v2", "prod", etag=made.etag)
        assert (moved.name, moved.alias, moved.version) == ("a", "prod", 2)
        for call in (set_alias(client, "a", "prod", etag=made.etag), delete_alias(client, "prod", etag=made.etag)):
            how = await refused(call, "ABORTED", "ALIAS_CHANGED")
            assert how.metadata["actual"] == moved.etag
        listed = await client.bundles.ListAliases(pb.ListAliasesRequest())
        assert list(listed.aliases) == [moved]
        await delete_alias(client, "prod", etag=moved.etag)
        assert not (await client.bundles.ListAliases(pb.ListAliasesRequest(name="a"))).aliases
        await refused(delete_alias(client, "prod"), "NOT_FOUND", "ALIAS_NOT_FOUND")

    async def test_a_version_with_another_graph_abi(self, client: Client, runner: DirectedRunner) -> None:
        for version in ("1", OTHER_GRAPHS):
            await publish(client, runner, "a", version)
        await set_alias(client, "a:v1", "prod")
        request = pb.SetAliasRequest(ref="a:v2", alias="prod", require_compatible=True)
        how = await refused(client.bundles.SetAlias(request), "FAILED_PRECONDITION", "ALIAS_INCOMPATIBLE")
        named, wanted = [(await get(client, ref)).graph_abi_digest for ref in ("a@prod", "a:v2")]
        assert how.metadata["named_graph_abi_digest"] == named
        assert how.metadata["wanted_graph_abi_digest"] == wanted != named
        request.require_compatible = False
        (warning,) = (await client.bundles.SetAlias(request)).warnings
        assert f"a:v2 has graph ABI {wanted}, and a:v1, which a@prod named, has {named}" in warning
        assert (await get(client, "a@prod")).version == 2

    async def test_what_is_no_alias_of_no_version(self, client: Client, runner: DirectedRunner) -> None:
        await publish(client, runner, "a")
        for alias in ("", "v1", "blue-v1", "Prod", "a@b"):
            how = await refused(set_alias(client, "a", alias), "INVALID_ARGUMENT", "ALIAS_INVALID")
            assert "NAME-vN is the tag of NAME:vN" in how.fields["alias"]
        await refused(set_alias(client, "b", "prod"), "NOT_FOUND", "BUNDLE_NOT_FOUND")
        await refused(set_alias(client, MISSING, "prod"), "INVALID_ARGUMENT", "REF_INVALID")
