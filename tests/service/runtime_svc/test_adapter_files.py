"""Where adapters come from, and what they outlive: restarts, full disks, damaged files, and each other."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import msgspec
import pytest

from bundle.digest import sha256_bytes
from bundle.store.reader import open_bundle
from runtime_svc.bundles.library import BundleLibrary
from runtime_svc.bundles.source import ResolvedBundle
from runtime_svc.deployments.launcher import FileWatch
from runtime_svc.errors import BundleSourceUnavailable, StateUnwritable
from tests.bundles.newer import publish_newer
from tests.hang_guard import until
from tests.ranks.fakes import BIAS
from tests.servers.adapters import (
    BASE,
    HOUSE,
    ask_with,
    list_adapters,
    list_names,
    load_adapter,
    publish_adapter,
    unload_adapter,
    with_adapter,
)
from tests.servers.logs import Logs
from tests.servers.refusals import refused
from tests.servers.runtime import Runtime, hold, serve_runtime


def overwrite(path: Path) -> None:
    """Changes the bytes of a file in place, as its owner and root can."""
    path.chmod(0o644)
    path.write_bytes(b"9")


async def test_an_adapter_of_other_tensors_or_damaged_files_is_refused(based: Runtime) -> None:
    publish_adapter(based, "swords", 7)
    bundle = open_bundle(based.store, based.bundles.names["swords"])
    ((shard,),) = (adapter.shards for adapter in bundle.manifest.adapters)
    tensor = msgspec.structs.replace(shard.tensors[0], shape=(3,))
    adapter = msgspec.structs.replace(
        bundle.manifest.adapters[0], shards=(msgspec.structs.replace(shard, tensors=(tensor,)),)
    )
    based.bundles.names["larger"] = publish_newer(based.store, bundle.digest, adapters=msgspec.to_builtins((adapter,)))
    caught = await refused(load_adapter(based, "larger"), "FAILED_PRECONDITION", "WEIGHTS_INVALID")
    assert caught.fields == {"tensors[0]": "got float32 [3]; accepted: float32 []"}
    assert shard.blob is not None
    overwrite(bundle.blob_path(shard.blob))
    await refused(load_adapter(based, "swords"), "DATA_LOSS", "BLOB_CORRUPT")
    assert await list_names(based) == ["house"]


async def test_a_disk_that_takes_no_record_leaves_names_as_they_were(
    based: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_adapter(based, "swords", 7)
    publish_adapter(based, "hooks", 8)
    await load_adapter(based, "swords")

    async def full(*_: object) -> None:
        raise StateUnwritable("runtime.db", "disk full")

    with monkeypatch.context() as patched:
        for changed in ("save", "forget"):
            patched.setattr(based.server.deployments._records.adapters, changed, full)
        await refused(load_adapter(based, "hooks", replace=True), "INTERNAL", "STATE_UNWRITABLE")
        await refused(load_adapter(based, "hooks", name="hooks"), "INTERNAL", "STATE_UNWRITABLE")
        assert await list_names(based) == ["house", "pirate"]
        assert await ask_with(based, "pirate") == 7
        await refused(unload_adapter(based, "pirate"), "INTERNAL", "STATE_UNWRITABLE")
    assert await list_names(based) == ["house"]


async def test_adapters_outlive_ranks_weights_and_runtimes(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path) as first:
        await first.deploy(adapters=HOUSE, **BASE)
        first.publish("other", bias=BIAS + 5, **BASE)
        publish_adapter(first, "swords", 7)
        publish_adapter(first, "hooks", 8)
        await load_adapter(first, "swords")
        await load_adapter(first, "hooks", name="gone")
        before = await load_adapter(first, "hooks", name="hooks")
        await unload_adapter(first, "gone")
        first.ranks.die()
        await until(lambda: len(first.groups) == 2)
        await first.wait_for_state("READY")
        assert [await ask_with(first, name) for name in ("pirate", "hooks", "house")] == [7, 8, 100]
        await first.load_weights("other")
        assert await ask_with(first, "pirate") - 5 == 7
    async with serve_runtime(tmp_path) as second:
        await second.wait_for_state("READY")
        assert [one.name for one in (await list_adapters(second)).adapters] == ["hooks", "house", "pirate"]
        assert [await ask_with(second, name) - 5 for name in ("pirate", "hooks", "house")] == [7, 8, 100]
        after = (await list_adapters(second)).adapters
        assert [one.name for one in after] == ["hooks", "house", "pirate"]
        assert (after[0].bundle_ref, after[0].bundle_digest) == ("hooks", before.bundle_digest)
        await second.unload()
        await second.load(after[1].bundle_digest)
        assert await list_names(second) == ["house"], "an unload forgets the others"
    async with serve_runtime(tmp_path) as third:
        await third.wait_for_state("READY")
        assert await list_names(third) == ["house"]


async def test_a_restart_opens_bundles_of_adapters_when_requests_name_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"a{number}" for number in range(5)]
    async with serve_runtime(tmp_path) as first:
        story = (await first.deploy(adapters=HOUSE, **BASE)).roles[0].bundle_digest
        digests = [publish_adapter(first, name, number) for number, name in enumerate(names)]
        for name in names:
            await load_adapter(first, name, name=name)
    opened: list[str] = []
    resolve = BundleLibrary.resolve

    async def count(library: BundleLibrary, ref: str) -> ResolvedBundle:
        opened.append(ref)
        return await resolve(library, ref)

    monkeypatch.setattr(BundleLibrary, "resolve", count)
    async with serve_runtime(tmp_path) as second:
        await second.wait_for_state("READY")
        assert await list_names(second) == [*names, "house"]
        assert opened == [story]
        asked = await asyncio.gather(*(ask_with(second, name) for name in ("a3", "a3", "a1", "a3")))
        assert asked == [3, 3, 1, 3]
        assert sorted(opened[1:]) == sorted([digests[3], digests[1]]), "once each, also for requests that come together"
        await unload_adapter(second, "a0")
        await load_adapter(second, digests[4], name="a2", replace=True)
        assert [await ask_with(second, name) for name in ("a2", "a4")] == [4, 4]
        assert digests[0] not in opened
        assert digests[2] not in opened


async def test_an_adapter_whose_bundle_cannot_be_had_now_fails_a_request_and_serves_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve_runtime(tmp_path) as first:
        await first.deploy(adapters=HOUSE, **BASE)
        publish_adapter(first, "swords", 7)
        await load_adapter(first, "swords")
    async with serve_runtime(tmp_path) as second:
        await second.wait_for_state("READY")

        async def fail(*_: object) -> None:
            raise BundleSourceUnavailable("127.0.0.1:1", "no answer")

        with monkeypatch.context() as patched:
            patched.setattr(BundleLibrary, "resolve", fail)
            await refused(second.ask(with_adapter("pirate")), "UNAVAILABLE", "BUNDLE_SOURCE_UNAVAILABLE")
        assert await list_names(second) == ["house", "pirate"]
        assert await ask_with(second, "pirate") == 7


async def test_an_adapter_that_is_gone_after_a_restart_leaves_the_others(tmp_path: Path, logs: Logs) -> None:
    async with serve_runtime(tmp_path) as first:
        await first.deploy(adapters=HOUSE, **BASE)
        swords = publish_adapter(first, "swords", 7)
        publish_adapter(first, "hooks", 8)
        await load_adapter(first, "swords", name="house")
        await load_adapter(first, "hooks")
        overwrite(first.store.blob_path(sha256_bytes(b"7")))
    async with serve_runtime(tmp_path) as second:
        await second.wait_for_state("READY")
        assert await ask_with(second, "pirate") == 8
        for _ in range(2):
            await refused(second.ask(with_adapter("house")), "NOT_FOUND", "ADAPTER_NOT_FOUND")
        (loss,) = [log for log in logs if log["event"] == "an adapter is lost until it is loaded again"]
        assert (loss["adapter"], loss["bundle"]) == ("house", swords)
        assert await list_names(second) == ["house", "pirate"], "that of the bundle"
        publish_adapter(second, "repaired", 7)
        second.store.blob_path(sha256_bytes(b"7")).write_bytes(b"7")
        await load_adapter(second, swords, name="house")
        assert await ask_with(second, "house") == 7


async def test_a_file_that_is_written_ends_its_adapters_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime_svc.server.FileWatch", partial(FileWatch, interval_s=0.05))
    async with serve_runtime(tmp_path) as served:
        await served.deploy(adapters=HOUSE, **BASE)
        publish_adapter(served, "swords", 7)
        await load_adapter(served, "swords")
        stream = await hold(served, with_adapter("pirate"))
        overwrite(served.store.blob_path(sha256_bytes(b"7")))
        await refused(stream, "FAILED_PRECONDITION", "ADAPTER_UNWRITABLE")
        served.ranks.gate.set()
        assert await list_names(served) == ["house"]
        await refused(load_adapter(served, "swords"), "DATA_LOSS", "BLOB_CORRUPT")
        assert await ask_with(served, "house") == 100


async def test_equal_adapters_share_slots_and_outlive_each_other(based: Runtime) -> None:
    """Also one of the bundle and one of a principal, whose bundles are two."""
    publish_adapter(based, "same", 100)
    publish_adapter(based, "same-again", 100, max_new_tokens=3)
    await load_adapter(based, "same", name="a")
    await load_adapter(based, "same-again", name="b")
    assert [await ask_with(based, name) for name in ("house", "a", "b")] == [100, 100, 100]
    assert len(based.ranks.writes) == 1
    for name in ("a", "b"):
        await unload_adapter(based, name)
    assert await ask_with(based, "house") == 100


async def test_bundles_are_leased_while_their_adapters_are_used(based: Runtime) -> None:
    story = based.bundles.names["story"]
    swords, hooks = publish_adapter(based, "swords", 7), publish_adapter(based, "hooks", 8)
    leases = based.bundles.leases

    async def wait_for_leases(*digests: str) -> None:
        await until(lambda: {digest for _, digest in leases} == set(digests))

    await load_adapter(based, "swords")
    await wait_for_leases(story, swords)
    call = await hold(based, with_adapter("pirate"))
    await load_adapter(based, "hooks", replace=True)
    await wait_for_leases(story, swords, hooks)
    based.ranks.gate.set()
    async for _ in call:
        pass
    await unload_adapter(based, "pirate")
    await wait_for_leases(story)
