"""The database: runs one transaction at a time, outside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

from sqlalchemy import create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

from bundle.errors import ResourcesShort
from bundle.file_modes import make_private_database
from bundle.shortage import RETRY_AFTER_S, name_shortage, outlast_shortages
from compiler_svc.database.schema import prepare_schema
from compiler_svc.errors import DatabaseUnavailable

#: Seconds between the tries of a transaction while the host is short of something.
DELAYS_S: Final = (0.05, 0.2)
#: PostgreSQL's class of SQLSTATE.
_INSUFFICIENT_RESOURCES: Final = "53"

T = TypeVar("T")

#: The work of one transaction. Its result must not be bound to the session.
Work = Callable[[Session], T]


class Database:
    """A database that has all tables of this version."""

    def __init__(self, url: str) -> None:
        """Opens the database, creates missing tables and brings older ones up to date.

        Args:
            url: SQLAlchemy URL, such as `sqlite:////var/lib/kiln/kiln.db`.

        Raises:
            DatabaseUnavailable: The URL is malformed, its driver is missing, or the server does not answer.
            DatabaseSchemaUnsupported: A newer version of Kiln made its tables.
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

    async def run(self, work: Work[T]) -> T:
        """Runs one transaction: commits when `work` returns, rolls back when it raises.

        Raises:
            ResourcesShort: The database has no room, or no descriptors. The work may have been tried several times.
        """
        loop = asyncio.get_running_loop()
        return await outlast_shortages(lambda: loop.run_in_executor(self._executor, self._transact, work), DELAYS_S)

    def run_and_wait(self, work: Work[T]) -> T:
        """Runs one transaction and blocks until it ends: for threads and processes without an event loop."""
        return self._executor.submit(self._transact, work).result()

    def close(self) -> None:
        """Finishes running transactions and closes the connections."""
        self._executor.shutdown()
        self._engine.dispose()

    def _transact(self, work: Work[T]) -> T:
        try:
            with Session(self._engine, expire_on_commit=False) as session, session.begin():
                return work(session)
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
