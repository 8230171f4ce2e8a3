"""A PostgreSQL server that lives as long as a test run."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.tools import require_tool


@contextmanager
def run_postgres() -> Iterator[str]:
    """Runs a server on a socket in a directory of its own; yields its URL."""
    programs = require_tool("initdb").resolve().parent
    # PostgreSQL refuses to run as root.
    user = pwd.getpwnam("nobody") if os.getuid() == 0 else pwd.getpwuid(os.getuid())
    directory = Path(tempfile.mkdtemp(prefix="kiln-postgres-"))
    os.chown(directory, user.pw_uid, user.pw_gid)
    identity = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if os.getuid() == 0 else {}
    data = directory / "data"

    def run(program: str, *arguments: str) -> None:
        command = [str(programs / program), *arguments]
        subprocess.run(command, check=True, cwd=directory, stdout=subprocess.DEVNULL, timeout=120, **identity)  # type: ignore[call-overload]

    try:
        run("initdb", "--pgdata", str(data), "--username", "kiln", "--auth", "trust", "--no-sync", "--encoding", "UTF8")
        options = f"-c listen_addresses='' -c unix_socket_directories={directory} -c fsync=off"
        run("pg_ctl", "start", "--wait", "--pgdata", str(data), "--log", str(directory / "log"), "--options", options)
        try:
            yield f"postgresql+psycopg://kiln@/postgres?host={directory}"
        finally:
            run("pg_ctl", "stop", "--wait", "--pgdata", str(data), "--mode", "immediate")
    finally:
        shutil.rmtree(directory)
