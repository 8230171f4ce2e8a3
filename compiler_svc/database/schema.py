"""Brings older tables up to the version of this release."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, Engine, Table, delete, insert, inspect, select, text
from sqlalchemy.schema import CreateColumn

from compiler_svc.database.tables import Base, OperationRow, SchemaRow
from compiler_svc.errors import DatabaseSchemaUnsupported

#: Raise it with every release that changes the tables. Give new columns a `server_default` or make them nullable, so
#: that `prepare_schema` can add them to older tables; any other change needs a step of its own there.
SCHEMA_VERSION: Final = 5


def prepare_schema(engine: Engine) -> None:
    """Creates missing tables, and adds the columns that older tables lack.

    Raises:
        DatabaseSchemaUnsupported: A newer version of Kiln made the tables.
    """
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
