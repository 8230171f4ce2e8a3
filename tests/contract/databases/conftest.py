"""The database's tests, on every database that the host has."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from compiler_svc.database.engine import Database
from tests.tools import require_tool

P = ParamSpec("P")
T = TypeVar("T")


def run(database: Database, work: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
    return database.run_and_wait(lambda session: work(session, *args, **kwargs))


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """URL of a PostgreSQL server, on a socket in a directory of its own."""
    programs = require_tool("initdb").resolve().parent
    # PostgreSQL refuses to run as root.
    user = pwd.getpwnam("nobody") if os.getuid() == 0 else pwd.getpwuid(os.getuid())
    directory = Path(tempfile.mkdtemp(prefix="kiln-postgres-"))
    os.chown(directory, user.pw_uid, user.pw_gid)
    identity = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if os.getuid() == 0 else {}
    data = directory / "data"

    def act(program: str, *arguments: str) -> None:
        command = [str(programs / program), *arguments]
        subprocess.run(command, check=True, cwd=directory, stdout=subprocess.DEVNULL, timeout=120, **identity)  # type: ignore[call-overload]

    try:
        act("initdb", "--pgdata", str(data), "--username", "kiln", "--auth", "trust", "--no-sync", "--encoding", "UTF8")
        options = f"-c listen_addresses='' -c unix_socket_directories={directory} -c fsync=off"
        act("pg_ctl", "start", "--wait", "--pgdata", str(data), "--log", str(directory / "log"), "--options", options)
        try:
            yield f"postgresql+psycopg://kiln@/postgres?host={directory}"
        finally:
            act("pg_ctl", "stop", "--wait", "--pgdata", str(data), "--mode", "immediate")
    finally:
        shutil.rmtree(directory)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'kiln.db'}"
    server: str = request.getfixturevalue("postgres")
    engine = create_engine(server)
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    engine.dispose()
    return server


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    database = Database(url)
    yield database
    database.close()
