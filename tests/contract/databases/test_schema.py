import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import inspect, text
from sqlalchemy.orm import Session

from compiler_svc.database import names, operations, resumption, versions
from compiler_svc.database.engine import SCHEMA_VERSION, Database
from compiler_svc.database.names import UNOWNED, Publisher
from compiler_svc.errors import DatabaseSchemaUnsupported, NameOwned, OperationNotFound
from compiler_svc.records import Progress, Stage
from tests.contract.databases.conftest import run

# As the first version of Kiln made them, before tables had a version.
SCHEMA_1 = """
CREATE TABLE operations (
    operation_id VARCHAR(64) NOT NULL, name VARCHAR NOT NULL, request_id VARCHAR, request_digest VARCHAR NOT NULL,
    state VARCHAR NOT NULL, progress BLOB NOT NULL, result BLOB, error BLOB,
    create_time_ns BIGINT NOT NULL, update_time_ns BIGINT NOT NULL, PRIMARY KEY (operation_id), UNIQUE (request_id));
CREATE TABLE names (name VARCHAR(128) NOT NULL, last_version BIGINT NOT NULL, PRIMARY KEY (name));
CREATE TABLE versions (
    name VARCHAR(128) NOT NULL, version BIGINT NOT NULL, digest VARCHAR NOT NULL, size_bytes BIGINT NOT NULL,
    graph_abi_digest VARCHAR NOT NULL, create_time_ns BIGINT NOT NULL, PRIMARY KEY (name, version));
"""


@pytest.fixture
def old(tmp_path: Path) -> str:
    """URL of a database of schema 1, with one running operation and one version."""
    path = tmp_path / "kiln.db"
    with sqlite3.connect(path) as connection:
        connection.executescript(SCHEMA_1)
        progress = Progress(stage=Stage.LOWER).to_json()
        connection.execute(
            "INSERT INTO operations VALUES ('1', 'a', 'r', 'd', 'running', ?, NULL, NULL, 5, 6)", (progress,)
        )
        connection.execute("INSERT INTO names VALUES ('a', 1)")
        connection.execute("INSERT INTO versions VALUES ('a', 1, 'sha256:0', 10, 'sha256:1', 5)")
    return f"sqlite:///{path}"


def read_schema_version(session: Session) -> int:
    return int(session.execute(text("SELECT version FROM schema_version")).scalar_one())


def columns_of(database: Database) -> dict[str, set[str]]:
    inspector = inspect(database._engine)
    return {name: {column["name"] for column in inspector.get_columns(name)} for name in inspector.get_table_names()}


def test_old_tables_get_what_they_lack(old: str, tmp_path: Path) -> None:
    database, new = Database(old), Database(f"sqlite:///{tmp_path / 'new.db'}")
    assert columns_of(database) == columns_of(new)
    (unfinished,) = database.run_and_wait(resumption.list_unfinished)
    assert (unfinished.operation.name, unfinished.spec, unfinished.is_cancelled) == ("a", None, False)
    listed = run(database, versions.list_versions, name="", page_size=9, after=None)
    assert [version.size_bytes for version in listed.versions] == [10]
    for one in (database, new):
        assert one.run_and_wait(read_schema_version) == SCHEMA_VERSION
        one.close()


def test_what_earlier_releases_made_has_no_owner(old: str) -> None:
    """Of principals those with the scope admin, or a pattern, publish under its names, until they are given away."""
    database = Database(old)
    alice, admin = Publisher("alice", takes_any=False), Publisher("root", takes_any=True)

    def claim(publisher: Publisher) -> str:
        return run(database, names.claim_name, "a", publisher).owner

    with pytest.raises(NameOwned):
        claim(alice)
    assert claim(admin) == ""
    assert run(database, names.give_name, "a", "alice") == ""
    assert claim(alice) == "alice"
    operation = run(database, operations.get_operation, "1")
    assert operation.publisher == UNOWNED
    with pytest.raises(OperationNotFound):
        run(database, operations.get_operation, "1", "alice")
    assert run(database, operations.find_by_request_id, "r", "d") == operation
    database.close()


def test_a_step_that_was_killed_is_finished(old: str) -> None:
    with sqlite3.connect(old.removeprefix("sqlite:///")) as connection:
        connection.execute("ALTER TABLE operations ADD COLUMN spec BLOB")
    database = Database(old)
    assert run(database, operations.get_operation, "1").name == "a"
    database.close()


def test_opening_again_changes_nothing(old: str) -> None:
    for _ in range(2):
        database = Database(old)
        assert len(database.run_and_wait(resumption.list_unfinished)) == 1
        database.close()


def test_tables_of_a_newer_version_are_left_alone(old: str) -> None:
    Database(old).close()
    with sqlite3.connect(old.removeprefix("sqlite:///")) as connection:
        connection.execute(f"UPDATE schema_version SET version = {SCHEMA_VERSION + 1}")
    with pytest.raises(DatabaseSchemaUnsupported) as caught:
        Database(old)
    assert caught.value.metadata == {"version": str(SCHEMA_VERSION + 1), "supported": str(SCHEMA_VERSION)}
