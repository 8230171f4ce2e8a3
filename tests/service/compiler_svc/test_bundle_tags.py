"""Versions and aliases as tags of the store's index, over loopback."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from kiln.bundle.v1 import bundle_pb2 as pb
from kiln.compiler.v1 import compiler_pb2

from bundle.catalog import list_bundles
from bundle.digest import sha256_bytes
from bundle.layout import Layout
from bundle.oci import Index
from compiler_svc.database import tables
from compiler_svc.database.engine import Database
from tests.bundles.samples import publish_sample
from tests.hang_guard import HANG_S
from tests.servers.running_compiler import Client, DirectedRunner, refusal, response_of, serve_compiler
from tests.tools import require_tool


async def publish(client: Client, runner: DirectedRunner, name: str, version: str = "1") -> str:
    """Compiles a bundle whose content depends on `version`; returns its digest."""
    runner.bundle_version = version
    runner.is_open.set()
    return response_of(await client.finish(await client.compile(name=name, salt=version))).digest


async def set_alias(client: Client, ref: str, alias: str) -> None:
    await client.bundles.SetAlias(pb.SetAliasRequest(ref=ref, alias=alias))


async def collect(client: Client) -> int:
    return int((await client.bundles.CollectGarbage(pb.CollectGarbageRequest())).deleted_bundle_count)


def tags_in(home: Path) -> dict[str, str]:
    """Digests of the bundles in a compiler's store, by tag."""
    return {tag: bundle.digest for bundle in list_bundles(Layout(home / "store")) for tag in bundle.tags}


async def reach_tags(home: Path, expected: dict[str, str]) -> None:
    """Waits until the store has these tags alone: an operation is done a moment before its tag is written."""
    async with asyncio.timeout(HANG_S):
        while tags_in(home) != expected:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_tags_follow_versions_and_aliases(client: Client, runner: DirectedRunner, home: Path) -> None:
    first = await publish(client, runner, "tiny")
    await reach_tags(home, {"tiny-v1": first})
    second = await publish(client, runner, "tiny", "2")
    await set_alias(client, "tiny:v1", "prod")
    assert tags_in(home) == {"tiny-v1": first, "tiny-v2": second, "tiny-prod": first}
    await set_alias(client, "tiny:v2", "prod")
    await client.bundles.DeleteBundle(pb.DeleteBundleRequest(ref="tiny:v1"))
    assert tags_in(home) == {"tiny-v2": second, "tiny-prod": second}
    await client.bundles.DeleteAlias(pb.DeleteAliasRequest(name="tiny", alias="prod"))
    assert tags_in(home) == {"tiny-v2": second}


async def test_registry_tools_find_them(client: Client, runner: DirectedRunner, home: Path) -> None:
    digest = await publish(client, runner, "tiny")
    await set_alias(client, "tiny", "prod")
    for tag in ("tiny-v1", "tiny-prod"):
        command = [require_tool("skopeo"), "inspect", "--raw", f"oci:{home}/store:{tag}"]
        inspecting = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        raw, _ = await asyncio.wait_for(inspecting.communicate(), 60)
        assert sha256_bytes(raw) == digest


async def test_an_entry_says_what_a_version_adds(client: Client, runner: DirectedRunner, home: Path) -> None:
    (home / "models" / "owner").mkdir()
    shutil.copytree(home / "models" / "tiny", home / "models" / "owner" / "story")
    runner.is_open.set()
    digest = response_of(await client.finish(await client.compile(name="story", model="owner/story"))).digest
    await reach_tags(home, {"story-v1": digest})
    entries = Layout(home / "store").read_index().manifests
    assert [entry.annotations for entry in entries if entry.digest == digest] == [
        None,
        {
            "dev.kiln.ref": "story:v1",
            "org.opencontainers.image.ref.name": "story-v1",
            "org.opencontainers.image.source": "owner/story",
            "org.opencontainers.image.title": "story",
            "org.opencontainers.image.version": "v1",
        },
    ]


async def test_an_import_keeps_the_source(home: Path) -> None:
    """From a compiler's store, by the tag of a version, into the store of the next fleet."""
    async with serve_compiler(home) as (first, runner):
        digest = await publish(first, runner, "tiny")
        await reach_tags(home, {"tiny-v1": digest})
    (home / "next" / "models").mkdir(parents=True)
    async with serve_compiler(home / "next", "--import-root", f"{home}/store") as (client, _):
        request = pb.ImportBundleRequest(layout=f"{home}/store", source_ref="tiny-v1", name="story", alias="prod")
        events = [event async for event in client.bundles.ImportBundle(request)]
        assert events[-1].result.bundle.digest == digest
    assert tags_in(home / "next") == {"story-prod": digest, "story-v1": digest}
    sources = {
        (entry.annotations or {}).get("org.opencontainers.image.source") for entry in read(home / "next").manifests
    }
    assert sources == {None, "tiny"}


def read(home: Path) -> Index:
    return Layout(home / "store").read_index()


def edit(home: Path, *, strip: bool = False, rename: dict[str, str] | None = None) -> None:
    """Edits the tags in a store as a killed compiler or a person leaves them."""
    text = (home / "store" / "index.json").read_text()
    for old, new in (rename or {}).items():
        assert old in text
        text = text.replace(old, new)
    document = json.loads(text)
    if strip:
        document["manifests"] = [entry for entry in document["manifests"] if "annotations" not in entry]
    (home / "store" / "index.json").write_text(json.dumps(document))


@pytest.mark.parametrize("change", [{"strip": True}, {"rename": {"tiny-v1": "tiny-v9", "tiny-prod": "other"}}])
async def test_the_start_repairs_tags(home: Path, change: dict[str, Any]) -> None:
    async with serve_compiler(home) as (client, runner):
        digest = await publish(client, runner, "tiny")
        await set_alias(client, "tiny", "prod")
    edit(home, **change)
    assert "tiny-v1" not in tags_in(home)
    async with serve_compiler(home):
        assert tags_in(home) == {"tiny-v1": digest, "tiny-prod": digest}


async def test_a_database_of_an_earlier_release_gets_its_tags(home: Path) -> None:
    """Also where names and aliases of then share a tag, or end as tags of versions do."""
    async with serve_compiler(home) as (client, runner):
        digest = await publish(client, runner, "a")
        await publish(client, runner, "a-b")
        await reach_tags(home, {"a-v1": digest, "a-b-v1": digest})
    database = Database(f"sqlite:///{home}/store/kiln.db")
    aliases = [("a", "b-v1"), ("a", "b-c"), ("a-b", "c"), ("a", "old-v3")]

    def add(session: Any) -> None:
        session.add_all(tables.AliasRow(name=name, alias=alias, version=1, etag="e") for name, alias in aliases)

    database.run_and_wait(add)
    database.close()
    async with serve_compiler(home) as (client, _):
        assert tags_in(home) == {"a-v1": digest, "a-b-v1": digest, "a-old-v3": digest}
        assert (await client.bundles.GetBundle(pb.GetBundleRequest(ref="a@b-v1"))).bundle.digest == digest


async def test_tags_keep_no_bundle(client: Client, runner: DirectedRunner, home: Path) -> None:
    kept, by_hand = await publish(client, runner, "tiny"), publish_sample(Layout(home / "store"), version="2")
    layout = Layout(home / "store")
    stale = publish_sample(layout, version="3")
    with layout.lock():
        index = layout.read_index()
        for digest, annotations in (
            (by_hand, {"org.opencontainers.image.ref.name": "release"}),
            (stale, {"org.opencontainers.image.ref.name": "gone-v1", "dev.kiln.ref": "gone:v1"}),
        ):
            entry = index.find(digest)
            assert entry is not None
            index = index.with_manifest(msgspec.structs.replace(entry, annotations=annotations))
        layout.replace_index(index)
    assert await collect(client) == 1
    assert {bundle.digest for bundle in list_bundles(layout)} == {kept, by_hand}


@pytest.mark.parametrize("name", ["tiny-v1", "v1-v20"])
async def test_a_name_that_makes_tags_ambiguous_is_refused(
    client: Client, runner: DirectedRunner, home: Path, name: str
) -> None:
    source = Layout.create(home / "in")
    publish_sample(source)
    await publish(client, runner, "tiny")
    calls = [
        client.compile(name=name),
        client.compiler.ShardWeights(shard_request(name)),
        client.bundles.ImportBundle(pb.ImportBundleRequest(layout=str(source.root), name=name)),
    ]
    for call in calls:
        refused = await refusal(call)
        assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "NAME_INVALID")
        assert refused.metadata == {"name": name}
        assert "NAME-vN is the tag of NAME:vN" in refused.fields["name"]


def shard_request(name: str) -> Any:
    return compiler_pb2.ShardWeightsRequest(name=name, model="tiny", executables_ref="tiny")


@pytest.mark.parametrize("alias", ["v1", "blue-v1"])
async def test_an_alias_like_a_version_is_refused(client: Client, runner: DirectedRunner, alias: str) -> None:
    await publish(client, runner, "tiny")
    refused = await refusal(set_alias(client, "tiny", alias))
    assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "ALIAS_INVALID")
    assert "NAME-vN is the tag of NAME:vN" in refused.fields["alias"]


async def test_an_alias_whose_tag_another_has_is_refused(client: Client, runner: DirectedRunner, home: Path) -> None:
    for name in ("a", "a-b"):
        await publish(client, runner, name)
    await set_alias(client, "a", "b-c")
    refused = await refusal(set_alias(client, "a-b", "c"))
    assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "TAG_AMBIGUOUS")
    assert refused.metadata == {"alias": "c", "tag": "a-b-c", "other": "a@b-c"}
    await set_alias(client, "a", "b-c")
    await client.bundles.DeleteAlias(pb.DeleteAliasRequest(name="a", alias="b-c"))
    await set_alias(client, "a-b", "c")
    assert "a-b-c" in tags_in(home)
