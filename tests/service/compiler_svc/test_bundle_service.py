import hashlib
from pathlib import Path
from typing import Any

import grpc
import pytest
from kiln.bundle.v1 import bundle_pb2 as pb

from bundle.layout import Layout
from bundle.manifest import parse_manifest
from bundle.oci import MANIFEST_TYPE
from tests.bundles.samples import FILES, OTHER_GRAPHS, publish_sample
from tests.servers.running_compiler import Client, DirectedRunner, refusal, response_of

MISSING = "sha256:" + "0" * 64


async def publish(client: Client, runner: DirectedRunner, name: str, version: str = "1") -> str:
    """Compiles a bundle whose content depends on `version`; returns its digest."""
    runner.bundle_version = version
    runner.is_open.set()
    return response_of(await client.finish(await client.compile(name=name, salt=version))).digest


async def get(client: Client, ref: str) -> pb.Bundle:
    response: pb.GetBundleResponse = await client.bundles.GetBundle(pb.GetBundleRequest(ref=ref))
    return response.bundle


async def set_alias(client: Client, ref: str, alias: str, **fields: Any) -> pb.Alias:
    response: pb.SetAliasResponse = await client.bundles.SetAlias(pb.SetAliasRequest(ref=ref, alias=alias, **fields))
    return response.alias


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

    @pytest.mark.parametrize("ref", ["a", "a:v1", "a@prod", MISSING])
    async def test_what_is_not_there(self, client: Client, ref: str) -> None:
        refused = await refusal(get(client, ref))
        assert (refused.code, refused.reason) == (grpc.StatusCode.NOT_FOUND, "BUNDLE_NOT_FOUND")
        assert refused.metadata == {"ref": ref}

    @pytest.mark.parametrize("ref", ["", "A", "a:1", "a@v1", "sha256:00", "a:v0"])
    async def test_what_is_no_reference(self, client: Client, ref: str) -> None:
        refused = await refusal(get(client, ref))
        assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "REF_INVALID")


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

    async def test_a_foreign_page_token(self, client: Client) -> None:
        refused = await refusal(client.bundles.ListBundles(pb.ListBundlesRequest(page_token="!")))
        assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PAGE_TOKEN_INVALID")


class TestReadBlob:
    async def test_bytes_come_in_pieces_of_a_mebibyte(self, client: Client, home: Path) -> None:
        data = bytes(range(256)) * 9000
        digest = Layout(home / "store").put_blob(data).digest
        pieces = await read(client, digest)
        assert b"".join(pieces) == data
        assert [len(piece) for piece in pieces] == [1 << 20, 1 << 20, len(data) - (2 << 20)]
        assert b"".join(await read(client, digest, 1_500_000)) == data[1_500_000:]
        assert await read(client, digest, len(data)) == []

    @pytest.mark.parametrize("offset_bytes", [-1, 5])
    async def test_an_offset_outside(self, client: Client, home: Path, offset_bytes: int) -> None:
        digest = Layout(home / "store").put_blob(b"data").digest
        refused = await refusal(read(client, digest, offset_bytes))
        assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "OFFSET_INVALID")
        assert refused.fields == {"offset_bytes": f"got {offset_bytes}; accepted: 0 to 4"}

    async def test_a_blob_that_is_not_there(self, client: Client) -> None:
        refused = await refusal(read(client, MISSING))
        assert (refused.code, refused.reason) == (grpc.StatusCode.NOT_FOUND, "BLOB_NOT_FOUND")

    @pytest.mark.parametrize("digest", ["", "sha256:1", "../../etc/passwd", "sha256:" + "A" * 64])
    async def test_what_is_no_digest(self, client: Client, digest: str) -> None:
        refused = await refusal(read(client, digest))
        assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "DIGEST_INVALID")


@pytest.mark.parametrize("how", ["removed", "linked"])
async def test_a_lost_blob_is_lost_data(client: Client, runner: DirectedRunner, home: Path, how: str) -> None:
    digest = await publish(client, runner, "a")
    lost = (await get(client, digest)).blobs[-1].digest
    path = Layout(home / "store").blob_path(lost)
    path.rename(home / "elsewhere")
    if how == "linked":
        path.symlink_to(home / "elsewhere")
    for ref in ("a", digest):
        refused = await refusal(get(client, ref))
        assert (refused.code, refused.reason) == (grpc.StatusCode.DATA_LOSS, "BLOB_MISSING")
        assert refused.metadata == {"digest": lost, "bundle": digest}
    assert (await refusal(read(client, lost))).reason == "BLOB_NOT_FOUND"


class TestDelete:
    async def test_the_last_version_takes_its_blobs_along(
        self, client: Client, runner: DirectedRunner, home: Path
    ) -> None:
        digest = await publish(client, runner, "a")
        blobs = (await get(client, digest)).blobs
        freed = await client.bundles.DeleteBundle(pb.DeleteBundleRequest(ref="a:v1"))
        sizes = {blob.digest: blob.size_bytes for blob in blobs}
        assert (freed.deleted_blob_count, freed.deleted_size_bytes) == (len(sizes), sum(sizes.values()))
        layout = Layout(home / "store")
        assert list(layout.list_blobs()) == []
        assert layout.read_index().manifests == ()
        assert (await refusal(get(client, digest))).reason == "BUNDLE_NOT_FOUND"

    async def test_what_another_version_names_stays(self, client: Client, runner: DirectedRunner) -> None:
        digest = await publish(client, runner, "a")
        await publish(client, runner, "b")
        freed = await client.bundles.DeleteBundle(pb.DeleteBundleRequest(ref="a:v1"))
        assert (freed.deleted_blob_count, freed.deleted_size_bytes) == (0, 0)
        assert (await get(client, digest)).name == "b"

    async def test_blobs_that_another_bundle_shares_stay(self, client: Client, runner: DirectedRunner) -> None:
        for version in "12":
            await publish(client, runner, "a", version)
        freed = await client.bundles.DeleteBundle(pb.DeleteBundleRequest(ref="a:v1"))
        assert freed.deleted_blob_count == 2
        for blob in (await get(client, "a")).blobs:
            assert await read(client, blob.digest)

    async def test_a_deleted_bundle_is_built_again(self, client: Client, runner: DirectedRunner) -> None:
        await publish(client, runner, "a")
        await client.bundles.DeleteBundle(pb.DeleteBundleRequest(ref="a:v1"))
        await publish(client, runner, "a")
        assert len(runner.jobs) == 2
        assert (await get(client, "a")).version == 2

    async def test_a_version_with_an_alias_stays(self, client: Client, runner: DirectedRunner) -> None:
        await publish(client, runner, "a")
        await set_alias(client, "a", "prod")
        refused = await refusal(client.bundles.DeleteBundle(pb.DeleteBundleRequest(ref="a:v1")))
        assert (refused.code, refused.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "BUNDLE_IN_USE")
        assert refused.metadata == {"ref": "a:v1", "aliases": "prod"}

    @pytest.mark.parametrize(("ref", "reason"), [("a:v1", "BUNDLE_NOT_FOUND"), ("a", "REF_INVALID")])
    async def test_what_cannot_be_deleted(self, client: Client, ref: str, reason: str) -> None:
        assert (await refusal(client.bundles.DeleteBundle(pb.DeleteBundleRequest(ref=ref)))).reason == reason


class TestAliases:
    async def test_an_alias_is_made_moved_and_removed(self, client: Client, runner: DirectedRunner) -> None:
        for version in "12":
            await publish(client, runner, "a", version)
        made = await set_alias(client, "a:v1", "prod", etag="")
        moved = await set_alias(client, "a:v2", "prod", etag=made.etag)
        assert (moved.name, moved.alias, moved.version) == ("a", "prod", 2)
        listed = await client.bundles.ListAliases(pb.ListAliasesRequest())
        assert list(listed.aliases) == [moved]
        await client.bundles.DeleteAlias(pb.DeleteAliasRequest(name="a", alias="prod", etag=moved.etag))
        assert not (await client.bundles.ListAliases(pb.ListAliasesRequest(name="a"))).aliases

    async def test_a_stale_etag(self, client: Client, runner: DirectedRunner) -> None:
        await publish(client, runner, "a")
        alias = await set_alias(client, "a", "prod")
        calls = [
            set_alias(client, "a", "prod", etag="stale"),
            client.bundles.DeleteAlias(pb.DeleteAliasRequest(name="a", alias="prod", etag="stale")),
        ]
        for call in calls:
            refused = await refusal(call)
            assert (refused.code, refused.reason) == (grpc.StatusCode.ABORTED, "ALIAS_CHANGED")
            assert refused.metadata["actual"] == alias.etag

    async def test_a_version_with_another_graph_abi(self, client: Client, runner: DirectedRunner) -> None:
        for version in ("1", OTHER_GRAPHS):
            await publish(client, runner, "a", version)
        await set_alias(client, "a:v1", "prod")
        request = pb.SetAliasRequest(ref="a:v2", alias="prod", require_compatible=True)
        refused = await refusal(client.bundles.SetAlias(request))
        assert (refused.code, refused.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "ALIAS_INCOMPATIBLE")
        named, wanted = [(await get(client, ref)).graph_abi_digest for ref in ("a@prod", "a:v2")]
        assert refused.metadata["named_graph_abi_digest"] == named
        assert refused.metadata["wanted_graph_abi_digest"] == wanted != named
        request.require_compatible = False
        (warning,) = (await client.bundles.SetAlias(request)).warnings
        assert f"a:v2 has graph ABI {wanted}, and a:v1, which a@prod named, has {named}" in warning
        assert (await get(client, "a@prod")).version == 2

    @pytest.mark.parametrize("alias", ["", "v1", "Prod", "a@b"])
    async def test_what_is_no_alias(self, client: Client, runner: DirectedRunner, alias: str) -> None:
        await publish(client, runner, "a")
        refused = await refusal(set_alias(client, "a", alias))
        assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "ALIAS_INVALID")

    async def test_what_is_not_there(self, client: Client) -> None:
        assert (await refusal(set_alias(client, "a", "prod"))).reason == "BUNDLE_NOT_FOUND"
        refused = await refusal(client.bundles.DeleteAlias(pb.DeleteAliasRequest(name="a", alias="prod")))
        assert (refused.code, refused.reason) == (grpc.StatusCode.NOT_FOUND, "ALIAS_NOT_FOUND")

    async def test_a_digest_names_no_version(self, client: Client) -> None:
        assert (await refusal(set_alias(client, MISSING, "prod"))).reason == "REF_INVALID"
