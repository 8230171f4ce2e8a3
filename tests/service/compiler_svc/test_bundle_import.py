"""Imports from other layouts, over loopback."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kiln.bundle.v1 import bundle_pb2 as pb

from bundle.store.layout import Layout
from bundle.store.reader import open_bundle
from bundle.store.referrers import add_referrer, list_referrers
from bundle.store.verification import BlobVerifier
from tests.bundles.samples import DIGESTS, OTHER_GRAPHS, publish_sample
from tests.hang_guard import HANG_S
from tests.servers.refusals import Refusal, refusal
from tests.servers.running_compiler import Client, serve_compiler


@pytest.fixture
async def client(home: Path) -> AsyncIterator[Client]:
    async with serve_compiler(home, "--import-root", f"{home}/in") as (client, _):
        yield client


@pytest.fixture
def source(home: Path) -> Layout:
    return Layout.create(home / "in" / "source")


def start(client: Client, source: Layout | Path | str, **fields: Any) -> Any:
    layout = str(source.root if isinstance(source, Layout) else source)
    return client.bundles.ImportBundle(pb.ImportBundleRequest(**({"layout": layout, "name": "a"} | fields)))


async def finish(client: Client, source: Layout, **fields: Any) -> pb.ImportResult:
    events = [event async for event in start(client, source, **fields)]
    assert all(event.WhichOneof("event") == "progress" for event in events[:-1])
    return events[-1].result


async def refuse(client: Client, source: Layout | Path | str, code: str, reason: str, **fields: Any) -> Refusal:
    how = await refusal(start(client, source, **fields))
    assert (how.code.name, how.reason) == (code, reason), how
    return how


async def test_an_imported_bundle_is_named_and_aliased(client: Client, source: Layout, home: Path) -> None:
    digest = publish_sample(source, ref_name="release")
    add_referrer(source, digest, "a/timings", "text/plain", b"3 s", title="timings")
    events = [event async for event in start(client, source, source_ref="release", alias="prod", alias_etag="")]
    result = events[-1].result
    size_bytes = open_bundle(source, digest).size_bytes
    assert (result.bundle.name, result.bundle.version, result.bundle.digest) == ("a", 1, digest)
    assert list(result.bundle.aliases) == ["prod"]
    assert result.bundle.contents == pb.BUNDLE_CONTENTS_FULL
    assert (result.copied_blob_count, result.present_blob_count) == (10, 0)
    assert result.copied_size_bytes == events[-2].progress.total_bytes == events[-2].progress.done_bytes
    assert result.copied_size_bytes > size_bytes
    store = Layout(home / "store")
    open_bundle(store, digest).verify(BlobVerifier(None))
    assert len(list_referrers(store, digest)) == 1


async def test_a_second_import_moves_nothing(client: Client, source: Layout) -> None:
    digest = publish_sample(source)
    await finish(client, source)
    again = await finish(client, source, source_ref=digest)
    assert (again.copied_blob_count, again.present_blob_count, again.bundle.version) == (0, 7, 1)
    assert (await finish(client, source, name="b")).bundle.name == "b"


async def test_contents_are_told(client: Client, source: Layout) -> None:
    for contents, expected in (
        ("executables", pb.BUNDLE_CONTENTS_EXECUTABLES),
        ("weights", pb.BUNDLE_CONTENTS_WEIGHTS),
    ):
        digest = publish_sample(source, contents=contents)  # type: ignore[arg-type]
        result = await finish(client, source, source_ref=digest, name=contents)
        assert result.bundle.contents == expected
        page = await client.bundles.ListBundles(pb.ListBundlesRequest(name=contents))
        assert [bundle.contents for bundle in page.bundles] == [expected]


async def test_the_alias_is_checked_before_anything_moves(client: Client, source: Layout, home: Path) -> None:
    publish_sample(source)
    await refuse(client, source, "ABORTED", "ALIAS_CHANGED", alias="prod", alias_etag="stale")
    assert list(Layout(home / "store").list_blobs()) == []
    await finish(client, source)
    etag = (await client.bundles.SetAlias(pb.SetAliasRequest(ref="a:v1", alias="prod"))).alias.etag
    await refuse(client, source, "ABORTED", "ALIAS_CHANGED", alias="prod", alias_etag="")
    digest = publish_sample(source, version="2")
    moved = await finish(client, source, source_ref=digest, alias="prod", alias_etag=etag)
    assert (moved.bundle.version, list(moved.bundle.aliases)) == (2, ["prod"])


async def test_an_alias_that_moves_to_another_graph_abi_is_told_of(client: Client, source: Layout) -> None:
    for version, expected in (("1", 0), ("2", 0), (OTHER_GRAPHS, 1)):
        result = await finish(client, source, source_ref=publish_sample(source, version=version), alias="prod")
        assert len(result.warnings) == expected, result.warnings
    assert "a:v3 has graph ABI" in result.warnings[0]


async def test_what_cannot_be_imported(client: Client, source: Layout) -> None:
    publish_sample(source)
    for field, value, code, reason in (
        ("name", "", "INVALID_ARGUMENT", "NAME_INVALID"),
        ("name", "A", "INVALID_ARGUMENT", "NAME_INVALID"),
        ("alias", "v1", "INVALID_ARGUMENT", "ALIAS_INVALID"),
        ("source_ref", "absent", "NOT_FOUND", "BUNDLE_NOT_FOUND"),
        ("source_ref", "sha256:" + "0" * 64, "NOT_FOUND", "BUNDLE_NOT_FOUND"),
    ):
        await refuse(client, source, code, reason, **{field: value})
    publish_sample(source, version="2")
    error = await refuse(client, source, "NOT_FOUND", "BUNDLE_NOT_FOUND")
    assert "2 bundles" in error.message


async def test_what_is_no_layout(client: Client, home: Path, source: Layout) -> None:
    (home / "in" / "empty").mkdir()
    (source.root / "index.json").write_bytes(b"[]")
    for path in (home / "in" / "empty", home / "in" / "absent", source.root):
        error = await refuse(client, path, "INVALID_ARGUMENT", "LAYOUT_INVALID")
        assert error.metadata["path"] == str(path)
    for no_path in ("\0", "in\0side"):
        await refuse(client, no_path, "INVALID_ARGUMENT", "LAYOUT_INVALID")


async def test_paths_stay_under_the_import_roots(client: Client, home: Path, source: Layout) -> None:
    publish_sample(source)
    outside = Layout.create(home / "outside")
    publish_sample(outside)
    (home / "in" / "link").symlink_to(outside.root)
    (home / "in" / "blobs-elsewhere").mkdir()
    for name in ("oci-layout", "index.json"):
        (home / "in" / "blobs-elsewhere" / name).write_bytes((outside.root / name).read_bytes())
    (home / "in" / "blobs-elsewhere" / "blobs").symlink_to(outside.root / "blobs")
    paths = ["", "/", "source", outside.root, home / "in" / ".." / "outside", home / "in" / "link"]
    for path in (*paths, home / "in" / "blobs-elsewhere"):
        error = await refuse(client, path, "PERMISSION_DENIED", "PATH_OUTSIDE_IMPORT_ROOTS")
        assert error.metadata == {"path": str(path)}
    for name in ("oci-layout", "index.json"):
        (source.root / name).rename(home / name)
        (source.root / name).symlink_to(home / name)
        await refuse(client, source, "INVALID_ARGUMENT", "LAYOUT_INVALID")


async def test_without_import_roots_nothing_is_imported(home: Path, source: Layout) -> None:
    publish_sample(source)
    async with serve_compiler(home) as (client, _):
        await refuse(client, source, "PERMISSION_DENIED", "PATH_OUTSIDE_IMPORT_ROOTS")


async def test_a_corrupt_blob_is_named_and_no_version_made(client: Client, source: Layout, home: Path) -> None:
    publish_sample(source)
    digest = DIGESTS["tokenizer.json"]
    path = source.blob_path(digest)
    path.chmod(0o644)
    path.write_bytes(b"!" + path.read_bytes()[1:])
    error = await refuse(client, source, "DATA_LOSS", "BLOB_CORRUPT", alias="prod")
    assert error.metadata["title"] == "tokenizer.json"
    assert not (await client.bundles.ListBundles(pb.ListBundlesRequest())).bundles
    assert not (await client.bundles.ListAliases(pb.ListAliasesRequest())).aliases
    assert Layout(home / "store").read_index().manifests == ()


async def test_a_bundle_of_another_abi_or_with_an_unknown_feature_is_refused(client: Client, source: Layout) -> None:
    from tests.unit.bundle.store.test_reader import encode, image_document, list_image  # noqa: PLC0415

    for manifest, reason, fields in (
        ({"abi_version": 2}, "ABI_UNSUPPORTED", ()),
        ({"abi_version": 1, "required_features": ["antigravity"]}, "ABI_UNSUPPORTED", ("required_features",)),
        ({"abi_version": 1}, "MANIFEST_INVALID", ()),
    ):
        list_image(source, encode(image_document(source, encode(manifest))))
        error = await refuse(client, source, "FAILED_PRECONDITION", reason)
        assert not fields or error.fields == dict.fromkeys(fields, "got antigravity; accepted: none")


async def test_a_client_that_leaves_ends_the_import(
    client: Client, source: Layout, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = publish_sample(source)
    reached, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    new_blob = Layout.new_blob

    def wait_in_the_third(layout: Layout, **options: Any) -> Any:
        if options.get("replace") and len(list(layout.list_blobs())) == 2:
            loop.call_soon_threadsafe(reached.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(HANG_S)
        return new_blob(layout, **options)

    monkeypatch.setattr(Layout, "new_blob", wait_in_the_third)
    call = start(client, source)
    reading = asyncio.create_task(refusal(call))
    await asyncio.wait_for(reached.wait(), HANG_S)
    call.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    store = Layout(home / "store")
    async with asyncio.timeout(HANG_S):
        while store.read_pins():  # noqa: ASYNC110 - threads of the server
            await asyncio.sleep(0.05)
    assert store.read_index().manifests == ()
    assert 2 <= len(list(store.list_blobs())) < 7
    monkeypatch.setattr(Layout, "new_blob", new_blob)
    result = await finish(client, source)
    assert result.bundle.digest == digest
    assert result.present_blob_count >= 2
