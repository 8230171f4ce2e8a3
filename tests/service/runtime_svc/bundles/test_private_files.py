"""Files that other users may change are copied before they are mapped, or refused."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from bundle.errors import BlobCorrupt, ResourcesShort
from bundle.store.blob_writer import BlobWriter
from bundle.store.layout import Layout
from bundle.store.reader import Bundle
from bundle.store.verification import BlobVerifier
from runtime_svc.bundles.directory import BundleDirectory
from runtime_svc.bundles.errors import BlobExposed
from runtime_svc.bundles.library import BundleLibrary
from tests.bundles.published import publish


class Host:
    """A library over a mounted layout, with a bundle whose directory everybody can write."""

    def __init__(self, root: Path) -> None:
        self.layout = Layout.create(root / "mounted")
        self.digest = publish(self.layout)
        self.blobs = self.layout.root / "blobs/sha256"
        self.blobs.chmod(0o777)
        self.cache = Layout.create(root / "cache")
        self.library = BundleLibrary(
            None,
            directories=[BundleDirectory(self.layout.root)],
            store_root=None,
            cache=self.cache,
            verifier=BlobVerifier(root / "verified.db"),
        )

    async def fetch(self) -> Bundle:
        return await self.library.fetch(await self.library.resolve(self.digest), lambda *_: None)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def paths_of(bundle: Bundle) -> set[Path]:
    return {bundle.blob_path(blob.digest).parent for blob in bundle.blobs}


async def test_files_that_others_may_change_are_copied_once(host: Host) -> None:
    bundle = await host.fetch()
    await host.library.verify(bundle)
    assert paths_of(bundle) == {host.cache.root / "blobs/sha256"}
    before = {path: path.stat().st_mtime_ns for path in (host.cache.root / "blobs/sha256").iterdir()}
    # Now others do what they can. A copy protects what is mapped, and later loads.
    for path in host.blobs.iterdir():
        path.chmod(0o644)
    again = await host.fetch()
    await host.library.verify(again)
    assert {path: path.stat().st_mtime_ns for path in (host.cache.root / "blobs/sha256").iterdir()} == before


async def test_private_files_are_used_in_place(host: Host) -> None:
    host.blobs.chmod(0o755)
    bundle = await host.fetch()
    await host.library.verify(bundle)
    assert paths_of(bundle) == {host.blobs}
    assert list((host.cache.root / "blobs/sha256").iterdir()) == []


async def test_a_copy_has_the_right_bytes_or_is_none(host: Host) -> None:
    bundle = await host.fetch()
    weights = bundle.manifest.weight_sets[0].shards[0].blob
    assert weights is not None
    path = host.layout.blob_path(weights)
    path.chmod(0o644)
    path.write_bytes(b"9")
    with pytest.raises(BlobCorrupt, match=weights):
        await host.library.verify(bundle)
    assert not host.cache.has(weights)


@pytest.mark.parametrize(
    ("number", "error", "text"),
    [
        (errno.EROFS, BlobExposed, "directory can be written by its group.*Read-only file system"),
        (errno.ENOSPC, ResourcesShort, "disk space"),
    ],
    ids=["read-only", "full"],
)
async def test_without_a_cache_such_files_are_refused(
    host: Host, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception], text: str
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number), "/a/directory/of/the/host")

    bundle = await host.fetch()
    monkeypatch.setattr(BlobWriter, "write", fail)
    with pytest.raises(error, match=text) as caught:
        await host.library.verify(bundle)
    assert "/a/directory" not in str(caught.value)


async def test_a_cache_that_others_may_change_is_of_no_use(host: Host) -> None:
    (host.cache.root / "blobs/sha256").chmod(0o777)
    bundle = await host.fetch()
    with pytest.raises(BlobExposed, match="others may change the cache, too"):
        await host.library.verify(bundle)
