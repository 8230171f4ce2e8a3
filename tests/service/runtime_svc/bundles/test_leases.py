"""Leases on the bundles in use, against a service over the wire."""

from __future__ import annotations

import asyncio
from pathlib import Path

from runtime_svc.bundles.leases import LeaseKeeper
from tests.bundles.published import LayoutBundleService
from tests.hang_guard import until
from tests.servers.runtime import Runtime, serve_runtime


async def wait_for_leases(bundles: LayoutBundleService, *digests: str) -> str:
    """Waits until these and no others are leased; returns the holder."""
    await until(lambda: {digest for _, digest in bundles.leases} == set(digests))
    holders = {holder for holder, _ in bundles.leases}
    assert len(holders) <= 1
    return holders.pop() if holders else ""


async def test_bundles_are_leased_while_they_are_used(served: Runtime) -> None:
    story = (await served.deploy()).roles[0].bundle_digest
    pirate = served.publish("pirate", bias=31)
    await served.load("story", "e")
    assert (await wait_for_leases(served.bundles, story)).startswith("runtime/")
    await served.load_weights("pirate")
    await wait_for_leases(served.bundles, story, pirate)
    await served.load_weights("story")
    await wait_for_leases(served.bundles, story)
    await served.unload("d")
    await wait_for_leases(served.bundles, story)
    await served.unload("e")
    await wait_for_leases(served.bundles)


async def test_holder_and_leases_outlive_a_restart(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path) as first:
        digest = (await first.deploy()).roles[0].bundle_digest
        holder = await wait_for_leases(first.bundles, digest)
    assert first.bundles.leases, "shutting down is no end of use"
    async with serve_runtime(tmp_path) as second:
        assert await wait_for_leases(second.bundles, digest) == holder


async def test_service_that_is_away_is_asked_again(served: Runtime) -> None:
    digest = (await served.deploy()).roles[0].bundle_digest
    await wait_for_leases(served.bundles, digest)
    source = served.server.deployments.library._source
    served.bundles.is_away = True
    used = {digest}
    keeper = LeaseKeeper(source, "other", lambda: used, retry_s=0.02)
    task = asyncio.create_task(keeper.run())
    await asyncio.sleep(0.1)
    assert not task.done()
    served.bundles.is_away = False
    await until(lambda: served.bundles.leases["other", digest])
    served.bundles.is_away = True
    used.clear()
    keeper.wake()
    await asyncio.sleep(0.1)
    served.bundles.is_away = False
    await until(lambda: ("other", digest) not in served.bundles.leases)
    task.cancel()


async def test_leases_are_renewed_and_lost_bundles_do_not_matter(served: Runtime) -> None:
    digest = (await served.deploy()).roles[0].bundle_digest
    source = served.server.deployments.library._source
    keeper = LeaseKeeper(source, "other", lambda: {digest, "sha256:" + "7" * 64}, renew_s=0.04)
    task = asyncio.create_task(keeper.run())
    await until(lambda: served.bundles.leases["other", digest] >= 3)
    assert not task.done()
    task.cancel()
