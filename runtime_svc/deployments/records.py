"""What outlives this process: which deployments there are, and who this runtime is.

A record is written before its deployment is begun, again with every change of weights, and goes with the deployment.
SQLite makes each of these whole or not at all, whenever the process is killed.
"""

from __future__ import annotations

import asyncio
import fcntl
import sqlite3
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from runtime_svc.deployments.deployment_spec import DeploymentSpec, Origin
from runtime_svc.errors import StateInUse, StateInvalid, StateUnwritable

FILE_NAME: Final = "runtime.db"
LOCK_NAME: Final = "runtime.lock"
RUNTIME_ID: Final = "runtime_id"

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS deployments (id TEXT PRIMARY KEY, record BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""


class WeightsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Weights in use: the bundle that they come from, as asked for, and its digest."""

    ref: str
    digest: str


class DeploymentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What it takes to load a deployment again as it was."""

    spec: DeploymentSpec
    origin: Origin
    #: Digest of the bundle whose executables run.
    digest: str
    #: Where its ranks were placed.
    cores: tuple[int, ...]
    #: None while weights are awaited.
    weights: WeightsRecord | None
    weight_epoch: int
    created_at_s: float


class RecordStore:
    """The records of one state directory, which this process holds alone."""

    def __init__(self, directory: Path) -> None:
        """Opens or makes the directory; `close` gives it up.

        Raises:
            StateInUse: Another runtime holds it.
            StateInvalid: It cannot be made or opened, or its file is broken.
        """
        self._path = directory / FILE_NAME
        # One connection, one thread at a time.
        self._turn = asyncio.Lock()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = (directory / LOCK_NAME).open("wb")
        except OSError as error:
            raise StateInvalid(str(directory), str(error)) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise StateInUse(str(directory)) from error
        try:
            self._database = sqlite3.connect(self._path, check_same_thread=False)
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.executescript(_SCHEMA)
            self.runtime_id = self._read_runtime_id()
        except sqlite3.Error as error:
            self._lock.close()
            raise StateInvalid(str(self._path), str(error)) from error

    def list(self) -> list[DeploymentRecord]:
        """Every record, by deployment id.

        Raises:
            StateInvalid: One cannot be read.
        """
        try:
            rows = self._database.execute("SELECT record FROM deployments ORDER BY id").fetchall()
            return [msgspec.json.decode(record, type=DeploymentRecord) for (record,) in rows]
        except (sqlite3.Error, msgspec.DecodeError) as error:
            raise StateInvalid(str(self._path), str(error)) from error

    async def save(self, record: DeploymentRecord) -> None:
        """Writes a record in place of the deployment's last one; on the disk when this returns.

        Raises:
            StateUnwritable: The disk does not take it.
        """
        row = (record.spec.deployment_id, msgspec.json.encode(record))
        await self._write("INSERT OR REPLACE INTO deployments VALUES (?, ?)", row)

    async def forget(self, deployment_id: str) -> None:
        """Removes a record, if there is one.

        Raises:
            StateUnwritable: The disk does not take it.
        """
        await self._write("DELETE FROM deployments WHERE id = ?", (deployment_id,))

    def close(self) -> None:
        """Gives the directory up."""
        self._database.close()
        self._lock.close()

    async def _write(self, statement: str, row: Sequence[Any]) -> None:
        async with self._turn:
            # A caller that gives up must not let the next write begin beside this one.
            writing = asyncio.ensure_future(asyncio.to_thread(self._execute, statement, row))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await asyncio.wait([writing])
                raise

    def _execute(self, statement: str, row: Sequence[Any]) -> None:
        try:
            with self._database:
                self._database.execute(statement, row)
        except sqlite3.Error as error:
            raise StateUnwritable(str(self._path), str(error)) from error

    def _read_runtime_id(self) -> str:
        with self._database:
            self._database.execute("INSERT OR IGNORE INTO facts VALUES (?, ?)", (RUNTIME_ID, uuid.uuid4().hex))
        (value,) = self._database.execute("SELECT value FROM facts WHERE name = ?", (RUNTIME_ID,)).fetchone()
        return str(value)
