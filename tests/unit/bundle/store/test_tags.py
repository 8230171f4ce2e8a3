"""Tags in an index that repeat what a database says."""

import json
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from bundle.errors import LayoutInvalid
from bundle.reference import parse_reference
from bundle.store.catalog import list_bundles
from bundle.store.layout import Layout
from bundle.store.reader import open_bundle
from bundle.store.removal import Needs, collect_garbage, remove_bundle
from bundle.store.tags import WrittenTag, write_tags
from bundle.store.writer import register_bundle
from tests.bundles.samples import publish_sample, unlist_manifest
from tests.hang_guard import HANG_S


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout.create(tmp_path / "layout")


def tag(text: str, digest: str, version: int = 1, source: str | None = None) -> WrittenTag:
    return WrittenTag(parse_reference(text), digest, version, source)


def write(layout: Layout, *tags: WrittenTag) -> None:
    write_tags(layout, lambda: tags)


def tags_of(layout: Layout, digest: str) -> tuple[str, ...]:
    return next(one.tags for one in list_bundles(layout) if one.digest == digest)


def test_a_version_and_an_alias_are_entries_with_what_a_version_adds(layout: Layout) -> None:
    digest = publish_sample(layout)
    write(layout, tag("tiny:v3", digest, 3, "owner/tiny"), tag("tiny@prod", digest, 3))
    entries = json.loads((layout.root / "index.json").read_bytes())["manifests"]
    assert [entry.pop("digest") for entry in entries] == [digest] * 3
    assert [entry.get("annotations") for entry in entries] == [
        None,
        {
            "dev.kiln.ref": "tiny@prod",
            "org.opencontainers.image.ref.name": "tiny-prod",
            "org.opencontainers.image.title": "tiny",
            "org.opencontainers.image.version": "v3",
        },
        {
            "dev.kiln.ref": "tiny:v3",
            "org.opencontainers.image.ref.name": "tiny-v3",
            "org.opencontainers.image.source": "owner/tiny",
            "org.opencontainers.image.title": "tiny",
            "org.opencontainers.image.version": "v3",
        },
    ]
    for entry in entries:
        entry.pop("annotations", None)
    assert entries[0] == entries[1] == entries[2]


def test_what_is_gone_loses_its_tag_and_stays_listed(layout: Layout) -> None:
    first, second = (publish_sample(layout, version=version) for version in "12")
    write(layout, tag("a:v1", first), tag("a:v2", second), tag("a@prod", first))
    write(layout, tag("a:v2", second), tag("a@prod", second))
    assert tags_of(layout, first) == ()
    assert tags_of(layout, second) == ("a-prod", "a-v2")
    write(layout)
    assert [(entry.digest, entry.annotations) for entry in layout.read_index().manifests] == [
        (first, None),
        (second, None),
    ]


def test_an_index_that_is_right_is_left_alone(layout: Layout) -> None:
    digest = publish_sample(layout)
    write(layout, tag("a:v1", digest), tag("a@prod", digest))
    before = (layout.root / "index.json").stat()
    write(layout, tag("a@prod", digest), tag("a:v1", digest))
    assert (layout.root / "index.json").stat().st_ino == before.st_ino


def test_tags_of_people_stay_unless_a_version_has_them(layout: Layout) -> None:
    by_hand = publish_sample(layout, version="1", ref_name="release")
    taken = publish_sample(layout, version="2", ref_name="a-v1")
    digest = publish_sample(layout, version="3")
    write(layout, tag("a:v1", digest))
    assert [tags_of(layout, one) for one in (by_hand, taken, digest)] == [("release",), (), ("a-v1",)]
    assert open_bundle(layout, taken)


def test_written_tags_keep_nothing_from_being_collected(layout: Layout) -> None:
    named, unnamed, by_hand = (publish_sample(layout, version=version) for version in "123")
    register_bundle(layout, by_hand, ref_name="release")
    write(layout, tag("a:v1", named), tag("b:v1", unnamed), tag("c:v1", by_hand))
    assert collect_garbage(layout, lambda: Needs(bundles=frozenset({named}))).bundle_count == 1
    assert {one.digest: one.tags for one in list_bundles(layout)} == {
        named: ("a-v1",),
        by_hand: ("c-v1", "release"),
    }
    remove_bundle(layout, named)
    assert [one.digest for one in list_bundles(layout)] == [by_hand]


def test_lost_bundles_get_no_tag(layout: Layout) -> None:
    digest = publish_sample(layout)
    write(layout, tag("a:v1", digest))
    unlist_manifest(layout, digest)
    write(layout, tag("a:v1", digest))
    assert layout.read_index().manifests == ()


def test_where_names_of_earlier_releases_share_a_tag_the_version_has_it(layout: Layout) -> None:
    version, alias = (publish_sample(layout, version=version) for version in "12")
    write(layout, tag("a@b-v1", alias), tag("a-b:v1", version), tag("a@b-c", alias), tag("a-b@c", version))
    assert (tags_of(layout, version), tags_of(layout, alias)) == (("a-b-v1",), ())


def test_of_two_writers_the_last_has_read_last(layout: Layout) -> None:
    """The first one reads the database slowly. A second one, after a change of the database, waits for it."""
    digest = publish_sample(layout)
    is_reading, database = threading.Event(), [tag("a:v1", digest)]
    go_on = threading.Event()

    def read_slowly() -> Iterable[WrittenTag]:
        found = list(database)
        is_reading.set()
        assert go_on.wait(HANG_S)
        return found

    slow = threading.Thread(target=write_tags, args=(layout, read_slowly))
    slow.start()
    assert is_reading.wait(HANG_S)
    database.append(tag("a@prod", digest))
    fast = threading.Thread(target=write_tags, args=(layout, lambda: list(database)))
    fast.start()
    go_on.set()
    slow.join()
    fast.join()
    assert tags_of(layout, digest) == ("a-prod", "a-v1")


def test_a_broken_index_is_named(layout: Layout) -> None:
    (layout.root / "index.json").write_text("{")
    with pytest.raises(LayoutInvalid):
        write(layout)
