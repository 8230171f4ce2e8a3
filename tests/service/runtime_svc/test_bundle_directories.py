"""A runtime without a compiler: bundles from layouts in a mounted directory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from bundle.errors import BundleNotFound, LayoutInvalid
from bundle.layout import Layout
from bundle.oci import REF_NAME
from runtime_svc.server import open_server
from runtime_svc.settings import parse_settings
from tests.bundles.published import LayoutBundleService, publish
from tests.ranks.fakes import expected_tokens
from tests.servers.runtime import Runtime, raises, serve_runtime, tokens_of


def tag(layout: Layout, digest: str, name: str) -> None:
    """Names a bundle, as `skopeo copy … oci:LAYOUT:NAME` does."""
    with layout.lock():
        index = layout.read_index()
        entry = index.find(digest)
        assert entry is not None
        named = msgspec.structs.replace(entry, annotations={**(entry.annotations or {}), REF_NAME: name})
        layout.replace_index(index.with_manifest(named))


def add(layout: Layout, name: str, bias: int) -> str:
    digest = publish(layout, bias=bias)
    tag(layout, digest, name)
    return digest


@asynccontextmanager
async def serve(tmp_path: Path, *arguments: str) -> AsyncIterator[Runtime]:
    """A runtime that no BundleService helps."""
    settings = parse_settings(
        ["--address=127.0.0.1:0", f"--cache={tmp_path / 'cache'}", "--cores=4", "--follow-interval=0.05", *arguments],
        {},
    )
    served: Runtime | None = None

    async def start_ranks(*args: object, **options: object) -> object:
        assert served is not None
        return await served.start_ranks(*args, **options)  # type: ignore[arg-type]

    async with open_server(settings, start_ranks) as server:  # type: ignore[arg-type]
        nothing = Layout.create(tmp_path / "nothing")
        served = Runtime(server, await server.start(), nothing, LayoutBundleService(nothing))
        try:
            yield served
        finally:
            await served.channel.close()
            await server.edge._server.stop(None)


async def test_references_are_tags_of_a_layout(tmp_path: Path) -> None:
    layout = Layout.create(tmp_path / "mounted")
    first, second, third = (add(layout, f"story-v{version}", version) for version in (1, 2, 10))
    tag(layout, second, "story-prod")
    async with serve(tmp_path, f"--bundles={layout.root}") as served:
        wanted = {"story:v1": first, "story:v2": second, "story@prod": second, "story": third, first: first}
        for number, (ref, digest) in enumerate(wanted.items()):
            resolved = await served.server.deployments.library.resolve(ref)
            assert (resolved.digest, resolved.ref) == (digest, ref), number
        await served.load("story:v2")
        assert tokens_of(await served.generate([5])) == expected_tokens([5], 5, bias=2)
        async with raises("NOT_FOUND", "BUNDLE_NOT_FOUND") as caught:
            await served.load("story:v3", "e")
        assert "no compiler to ask" in str(caught[0].details())


async def test_a_directory_of_layouts(tmp_path: Path) -> None:
    bundles = tmp_path / "bundles"
    bundles.mkdir()
    (bundles / "lost+found").mkdir()
    async with serve(tmp_path, f"--bundles={bundles}") as served:
        async with raises("NOT_FOUND", "BUNDLE_NOT_FOUND"):
            await served.load("other")
        add(Layout.create(bundles / "story"), "story-v1", 1)
        add(Layout.create(bundles / "other"), "other", 3)
        await served.load("other")
        assert tokens_of(await served.generate([5])) == expected_tokens([5], 5, bias=3)


async def test_the_directory_is_only_read(tmp_path: Path) -> None:
    layout = Layout.create(tmp_path / "mounted")
    add(layout, "story-v1", 1)
    before = {path: path.stat().st_mtime_ns for path in layout.root.rglob("*")}
    async with serve(tmp_path, f"--bundles={layout.root}") as served:
        await served.load("story:v1")
        await served.generate([5])
    assert {path: path.stat().st_mtime_ns for path in layout.root.rglob("*")} == before
    assert list(Layout(tmp_path / "cache/blobs").list_blobs()) == []


async def test_a_moved_tag_is_followed(tmp_path: Path) -> None:
    layout = Layout.create(tmp_path / "mounted")
    add(layout, "story-prod", 1)
    async with serve(tmp_path, f"--bundles={layout.root}") as served:
        await served.load("story@prod", follow_alias=True)
        digest = add(layout, "story-prod", 2)
        async with asyncio.timeout(5):
            while (await served.get()).roles[0].weights_digest != digest:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert tokens_of(await served.generate([5])) == expected_tokens([5], 5, bias=2)


async def test_deployments_come_back_without_a_compiler(tmp_path: Path) -> None:
    layout = Layout.create(tmp_path / "mounted")
    add(layout, "story-v1", 4)
    async with serve(tmp_path, f"--bundles={layout.root}") as served:
        await served.load("story:v1")
        await served.server.drain()
    async with serve(tmp_path, f"--bundles={layout.root}") as served:
        await served.wait_for_state("READY")
        assert tokens_of(await served.generate([5])) == expected_tokens([5], 5, bias=4)


async def test_beside_a_compiler_the_directory_is_asked_first(tmp_path: Path) -> None:
    layout = Layout.create(tmp_path / "mounted")
    add(layout, "story", 7)
    async with serve_runtime(tmp_path, f"--bundles={layout.root}") as served:
        served.publish("story", bias=1)
        served.publish("other", bias=2)
        await served.load("story")
        assert tokens_of(await served.generate([5])) == expected_tokens([5], 5, bias=7)
        assert served.bundles.lookups == []
        await served.load("other", "e")
        assert served.bundles.lookups == ["other"]
        assert tokens_of(await served.generate([5], deployment_id="e")) == expected_tokens([5], 5, bias=2)


async def test_a_bundle_that_vanishes_is_named(tmp_path: Path) -> None:
    layout = Layout.create(tmp_path / "mounted")
    digest = add(layout, "story", 7)
    async with serve(tmp_path, f"--bundles={layout.root}") as served:
        library = served.server.deployments.library
        resolved = await library.resolve("story")
        layout.replace_index(layout.read_index().without_manifest(digest))
        with pytest.raises(BundleNotFound, match="gone from the directories of bundles"):
            await library.fetch(resolved, lambda _done, _total: None)


async def test_a_directory_that_does_not_exist_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(LayoutInvalid, match="absent is no OCI image layout: no directory"):
        async with serve(tmp_path, f"--bundles={tmp_path / 'absent'}"):
            pass
