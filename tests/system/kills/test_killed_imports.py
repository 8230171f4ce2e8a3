"""Imports, deletions and collections of a service that is killed in the midst of them."""

import asyncio
from pathlib import Path

import pytest

from bundle.store.layout import Layout
from bundle.store.reader import open_bundle
from bundle.store.removal import Collected
from bundle.store.verification import BlobVerifier
from compiler_svc.bundles.store import BundleStore
from tests.bundles.samples import publish_sample
from tests.kill_points import repeat
from tests.system.kills.import_until_killed import open_store, work


async def name_first(home: Path) -> None:
    """A store with one bundle, which an alias names."""
    database, store = open_store(home)
    await store.name_bundle("a", publish_sample(store.layout), lambda _session, version: version)
    await store.set_alias("a:v1", "prod", "")
    database.close()


async def recover(home: Path) -> tuple[int, int, Collected]:
    """What the next process finds: the version of the alias, how many versions there are, and what it collects."""
    database, store = open_store(home)
    try:
        versions = (await store.list_versions(name="", page_size=10, after=None)).versions
        for version in versions:
            open_bundle(store.layout, version.digest).verify(BlobVerifier(None))
        (alias,) = await store.list_aliases("")
        assert alias.version in {version.version for version in versions}
        collected = await store.collect_garbage()
        await assert_nothing_superfluous(store)
        return alias.version, len(versions), collected
    finally:
        database.close()


async def assert_nothing_superfluous(store: BundleStore) -> None:
    versions = (await store.list_versions(name="", page_size=10, after=None)).versions
    needed = {version.digest for version in versions} | {lease.digest for lease in await store.list_leases("")}
    blobs = {blob.digest for digest in needed for blob in open_bundle(store.layout, digest).blobs}
    assert set(store.layout.list_blobs()) == blobs
    assert {entry.digest for entry in store.layout.read_index().manifests} == needed


def kill_imports(path: Path, step: int) -> list[Path]:
    """Homes of children that were killed, each later than the one before, up to one that came to its end."""
    asyncio.run(name_first(path / "before"))
    publish_sample(Layout.create(path / "source"), version="2")
    return repeat("tests.system.kills.import_until_killed", path / "before", path / "source", step=step)


@pytest.mark.slow
def test_versions_and_aliases_name_whole_bundles_whenever_the_service_is_killed(tmp_path: Path) -> None:
    states = [asyncio.run(recover(home)) for home in kill_imports(tmp_path, 6)]
    assert len(states) > 25
    named = [(alias, count) for alias, count, _ in states]
    # Before the import, between import and deletion, after it: in this order, and nothing else.
    assert sorted(set(named), key=named.index) == [(1, 1), (2, 2), (2, 1)]
    assert named == sorted(named, key=[(1, 1), (2, 2), (2, 1)].index)
    collected = [state[2] for state in states]
    assert any(one.bundle_count for one in collected), "some bundle was to be left without version"
    assert any(one.freed.blob_count and not one.bundle_count for one in collected), "and some blobs without bundle"


def test_a_killed_import_is_repeated(tmp_path: Path) -> None:
    for home in kill_imports(tmp_path, 61)[:-1]:
        if asyncio.run(recover(home))[:2] == (1, 1):
            asyncio.run(work(home, tmp_path / "source"))
            assert asyncio.run(recover(home))[:2] == (2, 1)
