"""Bundles from a store on this host, and over the wire into the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from bundle.errors import BlobCorrupt, BundleNotFound, ManifestInvalid, RefInvalid
from bundle.store.layout import Layout
from bundle.store.verification import BlobVerifier
from runtime_svc.bundles.grpc_source import CompilerEndpoint, GrpcBundleSource
from runtime_svc.bundles.library import BundleLibrary
from runtime_svc.errors import BundleSourceUnavailable
from tests.bundles.published import LayoutBundleService, publish
from tests.servers.runtime import serve_bundles

MakeLibrary = Callable[[Path | None], BundleLibrary]


@pytest.fixture
def service(tmp_path: Path) -> LayoutBundleService:
    return LayoutBundleService(Layout.create(tmp_path / "store"))


@pytest.fixture
async def make_library(service: LayoutBundleService, tmp_path: Path) -> AsyncIterator[MakeLibrary]:
    """Makes a library that asks the service and may have a store on this host."""
    async with serve_bundles(service) as address:
        source = GrpcBundleSource(CompilerEndpoint(address))
        cache, verifier = Layout.create(tmp_path / "cache"), BlobVerifier(tmp_path / "verified.db")
        yield lambda store_root: BundleLibrary(source, store_root=store_root, cache=cache, verifier=verifier)
        await source.close()


@pytest.fixture
def remote(make_library: MakeLibrary) -> BundleLibrary:
    return make_library(None)


async def fetch(library: BundleLibrary, ref: str) -> list[tuple[int, int]]:
    progress: list[tuple[int, int]] = []
    bundle = await library.fetch(await library.resolve(ref), lambda *counts: progress.append(counts))
    await library.verify(bundle)
    return progress


async def test_blobs_come_over_the_wire_once(service: LayoutBundleService, remote: BundleLibrary) -> None:
    digest = publish(service.layout, executable=bytes(5000))
    service.names["story"] = digest
    progress = await fetch(remote, "story")
    assert progress[-1][0] == progress[-1][1] > 5000
    assert progress == sorted(progress)
    assert len(service.blobs_read) == 5, "image manifest, config, executable, weights, tokenizer"
    service.blobs_read.clear()
    assert await fetch(remote, "story") == []
    assert service.blobs_read == []


async def test_fetched_bundle_needs_the_service_no_more(service: LayoutBundleService, remote: BundleLibrary) -> None:
    digest = publish(service.layout)
    await fetch(remote, digest)
    service.layout = Layout.create(service.layout.root.parent / "empty")
    assert (await remote.resolve(digest)).digest == digest
    await fetch(remote, digest)


async def test_store_on_this_host_is_used_in_place(service: LayoutBundleService, make_library: MakeLibrary) -> None:
    library = make_library(service.layout.root)
    digest = publish(service.layout)
    bundle = await library.fetch(await library.resolve(digest), lambda *_: None)
    await library.verify(bundle)
    assert all(bundle.blob_path(blob.digest).is_relative_to(service.layout.root) for blob in bundle.blobs)
    assert service.blobs_read == service.lookups == []


async def test_store_may_appear_later(make_library: MakeLibrary, tmp_path: Path) -> None:
    root = tmp_path / "later"
    library = make_library(root)
    with pytest.raises(BundleNotFound):
        await library.resolve("sha256:" + "1" * 64)
    digest = publish(Layout.create(root))
    assert (await library.resolve(digest)).digest == digest


async def test_flipped_byte_on_the_way_names_the_blob(service: LayoutBundleService, remote: BundleLibrary) -> None:
    digest = publish(service.layout)
    resolved = await remote.resolve(digest)
    weights = next(blob for blob in resolved.blobs if "weights" in blob.title)
    service.flipped.add(weights.digest)
    with pytest.raises(BlobCorrupt, match=weights.digest):
        await remote.fetch(resolved, lambda *_: None)
    service.flipped.clear()
    await fetch(remote, digest)


async def test_source_that_sends_too_much_is_stopped(service: LayoutBundleService, remote: BundleLibrary) -> None:
    digest = publish(service.layout)
    service.extra_bytes = 100_000
    with pytest.raises(BlobCorrupt, match="more than the"):
        await fetch(remote, digest)


async def test_broken_connection_keeps_what_has_come(service: LayoutBundleService, remote: BundleLibrary) -> None:
    digest = publish(service.layout, executable=bytes(50_000))
    service.fail_after_bytes = 40_000
    with pytest.raises(BundleSourceUnavailable, match="going away"):
        await fetch(remote, digest)
    num_read = len(service.blobs_read)
    service.fail_after_bytes = None
    service.blobs_read.clear()
    await fetch(remote, digest)
    assert len(service.blobs_read) == 5 - (num_read - 1)


async def test_description_that_differs_from_the_bundle(service: LayoutBundleService, remote: BundleLibrary) -> None:
    resolved = await remote.resolve(publish(service.layout))
    lie = msgspec.structs.replace(resolved.manifest, tp_degree=2)
    with pytest.raises(ManifestInvalid, match="another"):
        await remote.fetch(dataclasses.replace(resolved, manifest=lie), lambda *_: None)


async def test_unknown_and_malformed_references(remote: BundleLibrary) -> None:
    for ref in ("nothing", "nothing:v3", "nothing@prod", "sha256:" + "0" * 64):
        with pytest.raises(BundleNotFound):
            await remote.resolve(ref)
    with pytest.raises(RefInvalid):
        await remote.resolve("No Such Name")
