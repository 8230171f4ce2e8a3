"""Whose a bundle name is, on every database, with several compilers at once."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import create_engine, text

from compiler_svc.database import names, versions
from compiler_svc.database.engine import Database
from compiler_svc.database.names import UNOWNED, Publisher
from compiler_svc.errors import NameOwned
from tests.contract.databases.conftest import run

ALICE, BOB = Publisher("alice", takes_any=False), Publisher("bob", takes_any=False)
RELEASE = Publisher("release", takes_any=True)


def publish(database: Database, publisher: Publisher, letter: str = "1", name: str = "a") -> int:
    digests = dict.fromkeys(("digest", "graph_abi_digest"), "sha256:" + letter * 64)
    return run(database, versions.add_version, name=name, size_bytes=1, publisher=publisher, **digests).version


def test_the_first_publisher_owns_a_name(database: Database) -> None:
    assert publish(database, ALICE, "1") == 1
    for letter in "12":
        with pytest.raises(NameOwned) as caught:
            publish(database, BOB, letter)
        assert caught.value.metadata["name"] == "a"
    assert publish(database, ALICE, "2") == 2
    assert publish(database, RELEASE, "3") == 3
    assert publish(database, BOB, name="b") == 1
    # What a pattern or the scope admin allowed gave nothing away.
    with pytest.raises(NameOwned):
        publish(database, BOB, "4")


def test_a_name_without_owner_is_not_taken(database: Database) -> None:
    publish(database, UNOWNED)
    with pytest.raises(NameOwned):
        publish(database, ALICE, "2")


def test_a_name_is_given_away_and_kept_for_its_owner(database: Database) -> None:
    publish(database, UNOWNED)
    for former, owner in (("", "alice"), ("alice", "bob"), ("bob", "")):
        assert run(database, names.give_name, "a", owner) == former
    run(database, names.give_name, "a", "bob")
    assert publish(database, BOB, "2") == 2
    assert run(database, names.give_name, "new", "alice") == ""
    with pytest.raises(NameOwned):
        publish(database, BOB, name="new")
    assert publish(database, ALICE, name="new") == 1


def test_a_deleted_name_stays_its_owners(database: Database) -> None:
    publish(database, ALICE)
    run(database, versions.delete_version, versions.Reference(name="a", version=1))
    with pytest.raises(NameOwned):
        publish(database, BOB)


def test_a_database_of_schema_4_goes_on(url: str) -> None:
    former = Database(url)
    publish(former, UNOWNED)
    former.close()
    engine = create_engine(url)
    with engine.begin() as connection:
        for table, column in (("names", "owner"), ("operations", "principal"), ("operations", "takes_any_name")):
            connection.execute(text(f"ALTER TABLE {table} DROP COLUMN {column}"))
        connection.execute(text("UPDATE schema_version SET version = 4"))
    engine.dispose()
    database = Database(url)
    with pytest.raises(NameOwned):
        publish(database, ALICE, "2")
    assert publish(database, RELEASE, "2") == 2
    assert publish(database, ALICE, name="b") == 1
    database.close()


def test_of_several_compilers_one_gives_each_name_its_owner(url: str) -> None:
    compilers = [Database(url) for _ in range(4)]
    publishers = [Publisher(f"p{number}", takes_any=False) for number in range(4)]

    def try_all(number: int) -> list[int | None]:
        made: list[int | None] = []
        for name in range(25):
            try:
                made.append(publish(compilers[number], publishers[number], name=f"n{name}"))
            except NameOwned:
                made.append(None)
        return made

    with ThreadPoolExecutor(4) as pool:
        of_compilers = list(pool.map(try_all, range(4)))
    assert all(sorted(made, key=str) == [1, None, None, None] for made in zip(*of_compilers, strict=True))
    for one in compilers:
        one.close()


def test_versions_of_several_compilers_count_up(url: str) -> None:
    compilers = [Database(url) for _ in range(4)]

    def publish_five(number: int) -> list[int]:
        letters = "0123456789abcdef0123"[5 * number : 5 * number + 5]
        return [publish(compilers[number], RELEASE, letter) for letter in letters]

    with ThreadPoolExecutor(4) as pool:
        numbers = [number for made in pool.map(publish_five, range(4)) for number in made]
    # Equal bundles one behind the other are one version.
    assert set(numbers) == set(range(1, max(numbers) + 1))
    assert len(set(numbers)) > 15
    for one in compilers:
        one.close()
