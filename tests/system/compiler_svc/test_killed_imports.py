"""Imports, deletions and collections of a service that is killed in the midst of them."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from bundle.layout import Layout
from bundle.reader import open_bundle
from bundle.removal import Collected
from bundle.verification import BlobVerifier
from compiler_svc.bundles.store import BundleStore
from tests.bundles.samples import publish_sample
from tests.repository import ROOT
from tests.system.compiler_svc.import_until_killed import open_store, work

STEP = 6


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


@pytest.mark.slow
def test_versions_and_aliases_name_whole_bundles_whenever_the_service_is_killed(tmp_path: Path) -> None:
    asyncio.run(name_first(tmp_path / "before"))
    publish_sample(Layout.create(tmp_path / "source"), version="2")
    command = [sys.executable, "-m", "tests.system.compiler_svc.import_until_killed", str(tmp_path), str(STEP)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr
    last = int(result.stdout)
    states = [asyncio.run(recover(tmp_path / str(number))) for number in range(0, last + 1, STEP)]
    assert len(states) > 25
    named = [(alias, count) for alias, count, _ in states]
    # Before the import, between import and deletion, after it: in this order, and nothing else.
    assert sorted(set(named), key=named.index) == [(1, 1), (2, 2), (2, 1)]
    assert named == sorted(named, key=[(1, 1), (2, 2), (2, 1)].index)
    collected = [state[2] for state in states]
    assert any(one.bundle_count for one in collected), "some bundle was to be left without version"
    assert any(one.freed.blob_count and not one.bundle_count for one in collected), "and some blobs without bundle"


def test_a_killed_import_is_repeated(tmp_path: Path) -> None:
    asyncio.run(name_first(tmp_path / "before"))
    publish_sample(Layout.create(tmp_path / "source"), version="2")
    command = [sys.executable, "-m", "tests.system.compiler_svc.import_until_killed", str(tmp_path), "61"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
    for number in range(0, int(result.stdout), 61):
        home = tmp_path / str(number)
        if asyncio.run(recover(home))[:2] == (1, 1):
            asyncio.run(work(home, tmp_path / "source"))
            assert asyncio.run(recover(home))[:2] == (2, 1)
