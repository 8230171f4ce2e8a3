"""Writers, copies, removals and collections that are killed before each of their calls."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from bundle.errors import BundleNotFound
from bundle.store.layout import Layout
from bundle.store.reader import open_bundle
from bundle.store.referrers import list_referrers, read_referrer
from bundle.store.removal import Needs, collect_garbage
from bundle.store.transfer import copy_bundle
from bundle.store.verification import BlobVerifier
from tests.bundles.samples import publish_sample
from tests.kill_points import repeat
from tests.service.bundle.store.act_until_killed import ACTIONS, make_layouts


class Killed(NamedTuple):
    """Layouts in which a process was killed, each `step` calls later than the one before; in the last it came through.

    Attributes:
        first: Bundle that was there before and that no process touches.
        second: Bundle that comes or goes.
    """

    layouts: list[Path]
    first: str
    second: str
    step: int

    def sample(self, every: int) -> list[Path]:
        """The layouts of every so many calls."""
        return self.layouts[:: max(1, every // self.step)]


@pytest.fixture(scope="module", autouse=True)
def unsynced() -> Iterator[None]:
    """The kernel keeps what a killed process wrote; waiting for the disk hundreds of times proves nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _fd: None)
        yield


def kill(directory: Path, action: str, *, step: int = 1) -> Killed:
    first, second = make_layouts(directory)
    (directory / "first").write_text(first)
    (directory / "second").write_text(second)
    before = directory / ACTIONS[action][1]
    layouts = repeat("tests.service.bundle.store.act_until_killed", before, action, directory, step=step)
    return Killed(layouts, first, second, step)


#: Every call, and those that `make test` has time for.
STEPS = [7, pytest.param(1, marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=STEPS)
def published(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Killed:
    return kill(tmp_path_factory.mktemp("published"), "publish", step=request.param)


@pytest.fixture(scope="module", params=STEPS)
def copied(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Killed:
    return kill(tmp_path_factory.mktemp("copied"), "copy", step=request.param)


@pytest.fixture(scope="module", params=["remove", "collect"])
def removed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Killed:
    return kill(tmp_path_factory.mktemp(request.param), request.param)


def is_whole(layout: Layout, digest: str) -> bool:
    """Whether a bundle is there. If it is, it must be whole and have its referrer."""
    try:
        open_bundle(layout, digest).verify(BlobVerifier(None))
    except BundleNotFound:
        return False
    return True


def note_of(layout: Layout, digest: str) -> bytes:
    (referrer,) = list_referrers(layout, digest)
    return read_referrer(layout, referrer.digest)


def appearances(killed: Killed) -> list[int]:
    """Numbers of the layouts that have the second bundle. All must have the first, and no bundle in part."""
    numbers = []
    for number, root in enumerate(killed.layouts):
        layout = Layout(root)
        assert is_whole(layout, killed.first)
        assert note_of(layout, killed.first) == b"about 1"
        if is_whole(layout, killed.second):
            numbers.append(number)
        else:
            assert list_referrers(layout, killed.second) == ()
    return numbers


def collect(layout: Layout, *named: str) -> int:
    return collect_garbage(layout, lambda: Needs(bundles=frozenset(named))).freed.blob_count


def test_killed_writer_leaves_a_whole_bundle_or_none(published: Killed) -> None:
    visible = appearances(published)
    # From one step on, the rename of the index, and ever after.
    assert visible == list(range(visible[0], len(published.layouts)))
    assert 150 < visible[0] * published.step < (len(published.layouts) - 1) * published.step


def test_next_writer_clears_up_and_completes(published: Killed, tmp_path: Path) -> None:
    leftovers = 0
    for source in published.sample(7):
        root = shutil.copytree(source, tmp_path / source.name)
        leftovers += len(list((root / ".kiln" / "staging").iterdir()))
        layout = Layout.create(root)
        assert list((root / ".kiln" / "staging").iterdir()) == []
        assert publish_sample(layout, version="2") == published.second
        assert is_whole(layout, published.second)
        assert {path.name for path in root.iterdir()} == {".kiln", "blobs", "index.json", "oci-layout"}
    assert leftovers > 0, "some writer was to be killed in the middle of a blob"


def test_a_collection_takes_what_a_killed_writer_left(published: Killed, tmp_path: Path) -> None:
    pins = 0
    for source in published.sample(7):
        root = shutil.copytree(source, tmp_path / source.name)
        pins += len(list((root / ".kiln" / "pins").iterdir()))
        layout = Layout.create(root)
        collect(layout, published.first)
        assert is_whole(layout, published.first)
        # The bundle's seven blobs; the referrer's manifest, file, empty config and listing.
        assert len(list(layout.list_blobs())) == 11
        assert list((root / ".kiln" / "pins").iterdir()) == []
    assert pins > 5


def test_killed_copy_leaves_a_whole_bundle_or_none(copied: Killed) -> None:
    visible = appearances(copied)
    assert visible == list(range(visible[0], len(copied.layouts)))
    assert 100 < visible[0] * copied.step < (len(copied.layouts) - 1) * copied.step
    for number in visible:
        layout = Layout(copied.layouts[number])
        assert note_of(layout, copied.second) == b"about 2"
        # The tag comes with the bundle, not before it.
        assert "prod" in {entry.ref_name for entry in layout.read_index().manifests}
    for root in copied.layouts[: visible[0]]:
        assert "prod" not in {entry.ref_name for entry in Layout(root).read_index().manifests}


def test_next_copy_goes_on_where_the_killed_one_stopped(copied: Killed, tmp_path: Path) -> None:
    source = Layout(copied.layouts[0].parent / "source")
    present = []
    for killed in copied.sample(14):
        layout = Layout.create(shutil.copytree(killed, tmp_path / killed.name))
        done = copy_bundle(source, layout, copied.second, verifier=BlobVerifier(None))
        present.append(done.present_blob_count)
        assert done.copied_blob_count + done.present_blob_count == 10
        assert is_whole(layout, copied.second)
        collect(layout, copied.first, copied.second)
        assert is_whole(layout, copied.first)
    # Five files and the empty config are in both bundles.
    assert present == sorted(present)
    assert (present[0], present[-1]) == (6, 10)


def test_killed_removal_leaves_a_whole_bundle_or_none(removed: Killed) -> None:
    there = appearances(removed)
    assert there == list(range(len(there)))
    assert 5 < len(there) < len(removed.layouts) - 1


def test_a_collection_completes_a_killed_removal(removed: Killed, tmp_path: Path) -> None:
    for killed in removed.layouts[::3]:
        layout = Layout.create(shutil.copytree(killed, tmp_path / killed.name))
        collect(layout, removed.first)
        assert is_whole(layout, removed.first)
        assert not is_whole(layout, removed.second)
        assert len(list(layout.list_blobs())) == 11
