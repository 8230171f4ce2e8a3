"""Leases and collections, over loopback."""

import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from kiln.bundle.v1 import bundle_pb2 as pb

from bundle.store.layout import Layout
from bundle.store.reader import open_bundle
from bundle.store.verification import BlobVerifier
from compiler_svc.database import cache, leases
from compiler_svc.database.cache import CachedExecutable
from compiler_svc.database.engine import Database
from tests.bundles.samples import DIGESTS, publish_sample
from tests.servers.refusals import refusal, refused
from tests.servers.running_compiler import Client, DirectedRunner, serve_compiler
from tests.service.compiler_svc.test_bundle_service import MISSING, delete, publish

EXECUTABLE = DIGESTS["executables/token_generation_16.so"]
ACTION = "sha256:" + "a" * 64


async def lease(client: Client, ref: str, holder: str = "runtime/host-1", seconds: float | None = None) -> pb.Lease:
    request = pb.LeaseBundleRequest(ref=ref, holder=holder)
    if seconds is not None:
        request.duration.FromNanoseconds(round(seconds * 1e9))
    response: pb.LeaseBundleResponse = await client.bundles.LeaseBundle(request)
    return response.lease


async def release(client: Client, holder: str, digest: str = "") -> int:
    request = pb.ReleaseLeaseRequest(holder=holder, digest=digest)
    response: pb.ReleaseLeaseResponse = await client.bundles.ReleaseLease(request)
    return response.released_count


async def listed(client: Client, digest: str = "") -> list[tuple[str, str]]:
    response = await client.bundles.ListLeases(pb.ListLeasesRequest(digest=digest))
    return [(one.digest, one.holder) for one in response.leases]


async def collect(client: Client, **fields: object) -> pb.CollectGarbageResponse:
    request = pb.CollectGarbageRequest(**fields)  # type: ignore[arg-type]
    response: pb.CollectGarbageResponse = await client.bundles.CollectGarbage(request)
    return response


def work_on(home: Path, work: Callable[..., Any], *arguments: Any) -> Any:
    """Works on the database of a compiler."""
    with closing(Database(f"sqlite:///{home}/store/kiln.db")) as database:
        return database.run_and_wait(work, *arguments)


class TestLeases:
    async def test_a_lease_is_made_renewed_listed_and_released(self, client: Client, runner: DirectedRunner) -> None:
        first, second = [await publish(client, runner, "a", version) for version in "12"]
        made = await lease(client, "a:v1", seconds=60)
        assert (made.holder, made.digest) == ("runtime/host-1", first)
        assert 55 < made.expire_time.ToNanoseconds() / 1e9 - time.time() < 65
        renewed = await lease(client, first)
        assert 86_000 < renewed.expire_time.ToNanoseconds() / 1e9 - time.time() < 87_000
        await lease(client, "a", "runtime/host-2")
        assert await listed(client, first) == [(first, "runtime/host-1")]
        assert len(await listed(client)) == 2
        assert await release(client, "runtime/host-2", second) == 1
        assert await release(client, "runtime/host-2", second) == 0
        assert await release(client, "runtime/host-1") == 1
        assert await listed(client) == []

    async def test_what_cannot_be_leased(self, client: Client) -> None:
        holders, durations = [("", None), ("h" * 129, None)], [("h", 0.999), ("h", -1.0), ("h", 30 * 24 * 3600 + 1.0)]
        for field, given in (("holder", holders), ("duration", durations)):
            for holder, seconds in given:
                await refused(lease(client, "a", holder, seconds), "INVALID_ARGUMENT", "LEASE_INVALID", field)
        assert (await refusal(lease(client, "a:1"))).reason == "REF_INVALID"
        assert (await refusal(lease(client, MISSING))).reason == "BUNDLE_NOT_FOUND"


class TestNeeds:
    @pytest.mark.parametrize("end", ["released", "expired"])
    async def test_a_leased_bundle_outlives_its_version(
        self, client: Client, runner: DirectedRunner, home: Path, end: str
    ) -> None:
        digest = await publish(client, runner, "a")
        await lease(client, "a")
        assert (await delete(client, "a:v1")).deleted_blob_count == 0
        assert (await collect(client)).deleted_blob_count == 0
        layout = Layout(home / "store")
        open_bundle(layout, digest).verify(BlobVerifier(None))
        if end == "released":
            await release(client, "runtime/host-1")
        else:
            work_on(home, partial(leases.set_lease, holder="runtime/host-1", digest=digest, duration_s=-1.0))
        collected = await collect(client)
        assert (collected.deleted_bundle_count, collected.deleted_blob_count) == (1, 7)
        assert list(layout.list_blobs()) == []

    async def test_a_build_keeps_its_bundle_until_a_version_names_it(
        self, client: Client, runner: DirectedRunner, home: Path
    ) -> None:
        """Does what a build process does at its end, and what the service does then."""
        digest = publish_sample(Layout(home / "store"))
        keep = partial(leases.set_lease, holder=leases.BUILD_HOLDER, digest=digest, duration_s=leases.BUILD_DURATION_S)
        work_on(home, keep)
        assert (await collect(client)).deleted_bundle_count == 0
        assert await listed(client) == [(digest, leases.BUILD_HOLDER)]
        assert await publish(client, runner, "a") == digest
        assert await listed(client) == []

    async def test_a_dry_run_only_tells(self, client: Client, runner: DirectedRunner, home: Path) -> None:
        await publish(client, runner, "a")
        layout = Layout(home / "store")
        layout.put_blob(b"of no one")
        told = await collect(client, dry_run=True)
        assert (told.deleted_bundle_count, told.deleted_blob_count, told.deleted_size_bytes) == (0, 1, 9)
        assert told.kept_blob_count == 7
        assert told.kept_size_bytes == sum(layout.stored(blob).size_bytes for blob in layout.list_blobs()) - 9
        assert await collect(client) == told
        assert (await collect(client)).deleted_blob_count == 0

    async def test_cached_executables_stay_until_they_are_old_and_of_no_bundle(
        self, client: Client, runner: DirectedRunner, home: Path
    ) -> None:
        await publish(client, runner, "a")
        entry = CachedExecutable(
            blob=EXECUTABLE, size_bytes=880, format="aoti", state_convention="in_place", constants=()
        )
        work_on(home, cache.remember_executables, {ACTION: entry})
        assert (await collect(client, max_cache_age=Duration())).deleted_blob_count == 0
        assert work_on(home, cache.find_executable, ACTION) is not None
        assert (await delete(client, "a:v1")).deleted_blob_count == 6
        layout = Layout(home / "store")
        for age in (None, Duration(seconds=3600)):
            assert (await collect(client, max_cache_age=age)).deleted_blob_count == 0
            assert layout.has(EXECUTABLE)
        assert (await collect(client, max_cache_age=Duration())).deleted_blob_count == 1
        assert not layout.has(EXECUTABLE)
        assert work_on(home, cache.find_executable, ACTION) is None

    async def test_an_age_that_no_time_has(self, client: Client) -> None:
        for seconds in (2**63 - 1, 315_576_000_001, -1, -(2**63)):
            call = collect(client, max_cache_age=Duration(seconds=seconds))
            await refused(call, "INVALID_ARGUMENT", "CACHE_AGE_INVALID", "max_cache_age")
        assert (await collect(client, max_cache_age=Duration(seconds=315_576_000_000))).deleted_blob_count == 0


class TestStart:
    async def test_takes_what_a_killed_compiler_left(self, home: Path) -> None:
        """A bundle that it published and did not name, and blobs of one that it did not publish."""
        layout = Layout.create(home / "store")
        unnamed, loose = publish_sample(layout), layout.put_blob(b"loose").digest
        tagged = publish_sample(layout, version="2", ref_name="by-hand")
        async with serve_compiler(home) as (client, _):
            assert (await client.bundles.GetBundle(pb.GetBundleRequest(ref=tagged))).bundle.digest == tagged
            assert not layout.has(loose)
            assert not layout.has(unnamed)

    async def test_survives_a_store_that_cannot_be_collected(self, home: Path) -> None:
        layout = Layout.create(home / "store")
        manifest = layout.blob_path(publish_sample(layout, ref_name="by-hand"))
        manifest.chmod(0o644)
        manifest.write_bytes(b"{}")
        async with serve_compiler(home) as (client, runner):
            assert await publish(client, runner, "a", "2")
            await refused(collect(client), "DATA_LOSS", "LAYOUT_INVALID")

    async def test_a_version_whose_bundle_is_lost_is_told(self, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
        async with serve_compiler(home) as (client, runner):
            await publish(client, runner, "a")
        (home / "store" / "index.json").unlink()
        async with serve_compiler(home) as (client, _):
            assert (await refusal(lease(client, "a"))).reason == "BUNDLE_NOT_FOUND"
        assert "lost the bundle of a version" in "".join(capsys.readouterr())
