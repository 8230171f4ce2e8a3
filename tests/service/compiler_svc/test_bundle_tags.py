"""Versions and aliases as tags of the store's index, over loopback."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from kiln.bundle.v1 import bundle_pb2 as pb
from kiln.compiler.v1 import compiler_pb2

from bundle.store.catalog import list_bundles
from bundle.store.layout import Layout
from compiler_svc.database import tables
from tests.bundles.samples import publish_sample
from tests.hang_guard import HANG_S
from tests.servers.refusals import refused
from tests.servers.running_compiler import Client, DirectedRunner, serve_compiler
from tests.service.compiler_svc.test_bundle_leases import work_on
from tests.service.compiler_svc.test_bundle_service import delete, delete_alias, publish, set_alias


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
    await delete(client, "tiny:v1")
    assert tags_in(home) == {"tiny-v2": second, "tiny-prod": second}
    await client.bundles.DeleteAlias(pb.DeleteAliasRequest(name="tiny", alias="prod"))
    assert tags_in(home) == {"tiny-v2": second}


async def test_an_import_keeps_the_source(home: Path) -> None:
    """From a compiler's store, by the tag of a version, into the store of the next fleet."""
    async with serve_compiler(home) as (first, runner):
        digest = await publish(first, runner, "mine")
        await reach_tags(home, {"mine-v1": digest})
    (home / "next" / "models").mkdir(parents=True)
    async with serve_compiler(home / "next", "--import-root", f"{home}/store") as (client, _):
        request = pb.ImportBundleRequest(layout=f"{home}/store", source_ref="mine-v1", name="story", alias="prod")
        events = [event async for event in client.bundles.ImportBundle(request)]
        assert events[-1].result.bundle.digest == digest
    assert tags_in(home / "next") == {"story-prod": digest, "story-v1": digest}
    entries = Layout(home / "next" / "store").read_index().manifests
    assert {(entry.annotations or {}).get("org.opencontainers.image.source") for entry in entries} == {None, "tiny"}


@pytest.mark.parametrize("is_stripped", [True, False])
async def test_the_start_repairs_tags_that_a_killed_compiler_or_a_person_left(home: Path, is_stripped: bool) -> None:
    async with serve_compiler(home) as (client, runner):
        digest = await publish(client, runner, "tiny")
        await set_alias(client, "tiny", "prod")
    index = home / "store" / "index.json"
    document = json.loads(index.read_text().replace("tiny-v1", "tiny-v9").replace("tiny-prod", "other"))
    if is_stripped:
        document["manifests"] = [entry for entry in document["manifests"] if "annotations" not in entry]
    index.write_text(json.dumps(document))
    assert not {"tiny-v1", "tiny-prod"} & tags_in(home).keys()
    async with serve_compiler(home):
        assert tags_in(home) == {"tiny-v1": digest, "tiny-prod": digest}


async def test_a_database_of_an_earlier_release_gets_its_tags(home: Path) -> None:
    """Also where names and aliases of then share a tag, or end as tags of versions do."""
    async with serve_compiler(home) as (client, runner):
        digest = await publish(client, runner, "a")
        await publish(client, runner, "a-b")
        await reach_tags(home, {"a-v1": digest, "a-b-v1": digest})
    aliases = [("a", "b-v1"), ("a", "b-c"), ("a-b", "c"), ("a", "old-v3")]

    def add(session: Any) -> None:
        session.add_all(tables.AliasRow(name=name, alias=alias, version=1, etag="e") for name, alias in aliases)

    work_on(home, add)
    async with serve_compiler(home) as (client, _):
        assert tags_in(home) == {"a-v1": digest, "a-b-v1": digest, "a-old-v3": digest}
        assert (await client.bundles.GetBundle(pb.GetBundleRequest(ref="a@b-v1"))).bundle.digest == digest


async def test_a_name_that_makes_tags_ambiguous_is_refused(client: Client, runner: DirectedRunner, home: Path) -> None:
    source = Layout.create(home / "in")
    publish_sample(source)
    await publish(client, runner, "tiny")
    for name in ("tiny-v1", "v1-v20"):
        shards = compiler_pb2.ShardWeightsRequest(name=name, model="tiny", executables_ref="tiny")
        for call in (
            client.compile(name=name),
            client.compiler.ShardWeights(shards),
            client.bundles.ImportBundle(pb.ImportBundleRequest(layout=str(source.root), name=name)),
        ):
            how = await refused(call, "INVALID_ARGUMENT", "NAME_INVALID", name=name)
            assert "NAME-vN is the tag of NAME:vN" in how.fields["name"]


async def test_an_alias_whose_tag_another_has_is_refused(client: Client, runner: DirectedRunner, home: Path) -> None:
    for name in ("a", "a-b"):
        await publish(client, runner, name)
    await set_alias(client, "a", "b-c")
    ambiguous = set_alias(client, "a-b", "c")
    await refused(ambiguous, "INVALID_ARGUMENT", "TAG_AMBIGUOUS", alias="c", tag="a-b-c", other="a@b-c")
    await set_alias(client, "a", "b-c")
    await delete_alias(client, "b-c")
    await set_alias(client, "a-b", "c")
    assert "a-b-c" in tags_in(home)
