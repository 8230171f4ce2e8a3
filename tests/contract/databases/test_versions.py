from typing import Any

import pytest

from bundle.errors import BundleNotFound
from bundle.reference import parse_reference
from compiler_svc.database import versions
from compiler_svc.database.engine import Database
from compiler_svc.database.versions import Version
from compiler_svc.errors import AliasChanged, AliasIncompatible, AliasNotFound, BundleInUse
from tests.contract.databases.conftest import run


def digest(letter: str) -> str:
    return "sha256:" + letter * 64


def add(database: Database, name: str, letter: str, graph_abi: str = "f") -> Version:
    digests = {"digest": digest(letter), "graph_abi_digest": digest(graph_abi)}
    return run(database, versions.add_version, name=name, size_bytes=10, **digests)


def find(database: Database, text: str) -> Version:
    return run(database, versions.find_version, parse_reference(text))


def delete(database: Database, text: str) -> Version:
    return run(database, versions.delete_version, parse_reference(text))


def move_alias(database: Database, text: str, alias: str, **options: Any) -> versions.MovedAlias:
    return run(database, versions.set_alias, reference=parse_reference(text), alias=alias, **{"etag": None} | options)


def set_alias(database: Database, text: str, alias: str, etag: str | None = None) -> versions.Alias:
    return move_alias(database, text, alias, etag=etag).alias


def test_versions_count_up_per_name_unless_the_newest_digest_comes_again(database: Database) -> None:
    assert [add(database, "a", letter).version for letter in "12231"] == [1, 2, 2, 3, 4]
    assert add(database, "b", "1").version == 1


def test_a_deleted_number_is_not_given_out_again(database: Database) -> None:
    add(database, "a", "1")
    delete(database, "a:v1")
    assert add(database, "a", "1").version == 2


def test_references(database: Database) -> None:
    for letter in "12":
        add(database, "a", letter)
    add(database, "b", "1")
    set_alias(database, "a:v1", "prod")
    assert find(database, "a").version == 2
    assert find(database, "a:v1").digest == digest("1")
    assert find(database, "a@prod").aliases == ("prod",)
    assert find(database, digest("1")).name == "b"
    for missing in ("c", "a:v3", "a@test", digest("3")):
        with pytest.raises(BundleNotFound) as caught:
            find(database, missing)
        assert caught.value.metadata == {"ref": missing}


def test_an_unknown_version_is_told_with_those_that_exist(database: Database) -> None:
    for letter in "12":
        add(database, "story", letter)
    set_alias(database, "story:v1", "prod")
    for missing in ("story:v9", "story@nope"):
        with pytest.raises(BundleNotFound, match=f"no bundle '{missing}': story has v2, v1, @prod$"):
            find(database, missing)
    with pytest.raises(BundleNotFound, match=r"no bundle 'stry': no bundle has that name; did you mean story\?$"):
        find(database, "stry")
    for letter in "3456789":
        add(database, "story", letter)
    with pytest.raises(BundleNotFound, match=r"story has v9, v8, v7, v6, v5, v4, v3, v2 and 2 more$"):
        find(database, "story:v10")


def test_pages(database: Database) -> None:
    for name, letter in ("a1", "a2", "a3", "b1", "b2"):
        add(database, name, letter)
    found: list[tuple[str, int]] = []
    after: tuple[str, int] | None = None
    for _ in range(3):
        page = run(database, versions.list_versions, name="", page_size=2, after=after)
        found += [(version.name, version.version) for version in page.versions]
        after = page.next_key
    assert found == [("a", 3), ("a", 2), ("a", 1), ("b", 2), ("b", 1)]
    assert after is None
    only = run(database, versions.list_versions, name="b", page_size=9, after=None)
    assert [version.version for version in only.versions] == [2, 1]


def test_an_alias_moves_and_changes_its_etag(database: Database) -> None:
    for letter in "12":
        add(database, "a", letter)
    first = set_alias(database, "a:v1", "prod")
    assert set_alias(database, "a:v1", "prod") == first
    moved = set_alias(database, "a:v2", "prod", etag=first.etag)
    assert moved.version == 2
    assert moved.etag != first.etag
    with pytest.raises(AliasChanged) as caught:
        set_alias(database, "a:v1", "prod", etag=first.etag)
    assert caught.value.metadata["actual"] == moved.etag
    assert find(database, "a@prod").version == 2


def test_deleting_an_alias(database: Database) -> None:
    add(database, "a", "1")
    etag = set_alias(database, "a", "prod").etag
    with pytest.raises(AliasChanged):
        run(database, versions.delete_alias, name="a", alias="prod", etag="no")
    run(database, versions.delete_alias, name="a", alias="prod", etag=etag)
    with pytest.raises(AliasNotFound):
        run(database, versions.delete_alias, name="a", alias="prod", etag=None)


def test_a_version_with_an_alias_stays(database: Database) -> None:
    add(database, "a", "1")
    set_alias(database, "a", "prod")
    with pytest.raises(BundleInUse) as caught:
        delete(database, "a:v1")
    assert caught.value.metadata == {"ref": "a:v1", "aliases": "prod"}
    assert find(database, "a").version == 1


def test_named_bundles(database: Database) -> None:
    for name, letter in ("a1", "b1", "b2"):
        add(database, name, letter)
    delete(database, "a:v1")
    assert database.run_and_wait(versions.list_named_digests) == {digest("1"), digest("2")}
    delete(database, "b:v1")
    assert database.run_and_wait(versions.list_named_digests) == {digest("2")}


def test_references_of_some_bundles(database: Database) -> None:
    for name, letter in ("b1", "a1", "a2"):
        add(database, name, letter)
    assert run(database, versions.list_refs, {digest("1"), digest("3")}) == ["a:v1", "b:v1"]


def test_an_alias_is_checked_without_being_set(database: Database) -> None:
    add(database, "a", "1")
    etag = set_alias(database, "a:v1", "prod").etag
    for alias, good in (("prod", etag), ("prod", None), ("other", ""), ("other", None)):
        run(database, versions.check_alias, "a", alias, good)
    for alias, bad in (("prod", ""), ("prod", "stale"), ("other", "stale")):
        with pytest.raises(AliasChanged):
            run(database, versions.check_alias, "a", alias, bad)


def test_an_alias_that_moves_to_another_graph_abi_is_told_of_or_refused(database: Database) -> None:
    for letter, graph_abi in ("1f", "2f", "3e"):
        add(database, "a", letter, graph_abi)
    assert move_alias(database, "a:v1", "prod", require_compatible=True).warnings == ()
    assert move_alias(database, "a:v2", "prod", require_compatible=True).warnings == ()
    with pytest.raises(AliasIncompatible) as caught:
        move_alias(database, "a:v3", "prod", require_compatible=True)
    assert caught.value.metadata == {
        "alias": "a@prod",
        "named": "a:v2",
        "named_graph_abi_digest": digest("f"),
        "wanted": "a:v3",
        "wanted_graph_abi_digest": digest("e"),
    }
    assert find(database, "a@prod").version == 2
    moved = move_alias(database, "a:v3", "prod")
    assert (moved.alias.version, moved.warnings) == (3, (str(caught.value),))
    assert move_alias(database, "a:v3", "prod", require_compatible=True).warnings == (), "it is there already"
