"""The database: runs one transaction at a time, outside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine, Table, create_engine, delete, event, insert, inspect, make_url, select, text
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session
from sqlalchemy.schema import CreateColumn

from bundle.errors import ResourcesShort
from bundle.host.file_modes import make_private_database
from bundle.host.shortage import RETRY_AFTER_S, name_shortage, outlast_shortages
from compiler_svc.database.tables import Base, OperationRow, SchemaRow
from compiler_svc.errors import DatabaseSchemaUnsupported, DatabaseUnavailable

#: Seconds between the tries of a transaction while the host is short of something.
DELAYS_S: Final = (0.05, 0.2)
#: PostgreSQL's class of SQLSTATE.
_INSUFFICIENT_RESOURCES: Final = "53"

T = TypeVar("T")
P = ParamSpec("P")


class Database:
    """A database that has all tables of this version."""

    def __init__(self, url: str) -> None:
        """Opens the database of a SQLAlchemy URL, such as `sqlite:////var/lib/kiln/kiln.db`; creates missing tables and
        brings older ones up to date.
        """
        try:
            self._engine = create_engine(url)
            if self._engine.dialect.name == "sqlite":
                _make_file(self._engine.url.database)
                event.listen(self._engine, "connect", _prepare_sqlite)
            prepare_schema(self._engine)
        except (SQLAlchemyError, ImportError, OSError) as error:
            raise DatabaseUnavailable(_hide_password(url), str(error).partition("\n")[0]) from error
        # One thread, because SQLite has one writer; so transactions that read before they write never conflict.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="database")

    async def run(self, work: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs one transaction: commits when `work` returns, rolls back when it raises. What `work` returns must not be
        bound to the session.

        Raises:
            ResourcesShort: The database has no room, or no descriptors. The work may have been tried several times.
        """
        loop = asyncio.get_running_loop()
        transact = partial(self._transact, work, *args, **kwargs)
        return await outlast_shortages(lambda: loop.run_in_executor(self._executor, transact), DELAYS_S)

    def run_and_wait(self, work: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs one transaction and blocks until it ends: for threads and processes without an event loop."""
        return self._executor.submit(partial(self._transact, work, *args, **kwargs)).result()

    def close(self) -> None:
        """Finishes running transactions and closes the connections."""
        self._executor.shutdown()
        self._engine.dispose()

    def _transact(self, work: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with Session(self._engine, expire_on_commit=False) as session, session.begin():
                return work(session, *args, **kwargs)
        except DBAPIError as error:
            shortage = _name_shortage(error)
            if shortage is None:
                raise
            raise shortage from error


def _name_shortage(error: DBAPIError) -> ResourcesShort | None:
    """Names what the database lacks: by SQLite's code, or by PostgreSQL's class of insufficient resources."""
    if str(getattr(error.orig, "sqlstate", "")).startswith(_INSUFFICIENT_RESOURCES):
        return ResourcesShort("disk space", "the database is full", RETRY_AFTER_S)
    return None if error.orig is None else name_shortage(error.orig)


def _make_file(database: str | None) -> None:
    """Makes the file of an SQLite URL; URIs and databases in memory have none."""
    if database and database != ":memory:" and not database.startswith("file:"):
        make_private_database(Path(database))


def _prepare_sqlite(connection: Any, _record: object) -> None:
    # WAL lets build processes read while the service writes; FULL survives a power cut.
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=10000"):
        connection.execute(f"PRAGMA {pragma}")


def _hide_password(url: str) -> str:
    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return "of the settings"


#: Raise it with every release that changes the tables. Give new columns a `server_default` or make them nullable, so
#: that `prepare_schema` can add them to older tables; any other change needs a step of its own there.
SCHEMA_VERSION: Final = 5


def prepare_schema(engine: Engine) -> None:
    """Creates missing tables, and adds the columns that older tables lack."""
    with engine.begin() as connection:
        found = _read_version(connection)
        if found > SCHEMA_VERSION:
            raise DatabaseSchemaUnsupported(found, SCHEMA_VERSION)
        if found:
            _add_missing_columns(connection)
        Base.metadata.create_all(connection)
        if found < SCHEMA_VERSION:
            connection.execute(delete(SchemaRow))
            connection.execute(insert(SchemaRow).values(version=SCHEMA_VERSION))


def _read_version(connection: Connection) -> int:
    """Reads the version; 0 for a database without tables. Version 1 did not record itself."""
    inspector = inspect(connection)
    if inspector.has_table(SchemaRow.__tablename__):
        return int(connection.scalar(select(SchemaRow.version)) or 1)
    return 1 if inspector.has_table(OperationRow.__tablename__) else 0


def _add_missing_columns(connection: Connection) -> None:
    # Checks each column, because SQLite commits each change of a table: a killed upgrade may have made some of them.
    inspector = inspect(connection)
    for table in Base.metadata.sorted_tables:
        if inspector.has_table(table.name):
            _complete_table(connection, table, {column["name"] for column in inspector.get_columns(table.name)})


def _complete_table(connection: Connection, table: Table, existing: set[str]) -> None:
    for column in table.columns:
        if column.name not in existing:
            definition = CreateColumn(column).compile(dialect=connection.dialect)
            connection.execute(text(f"ALTER TABLE {table.name} ADD COLUMN {definition}"))
