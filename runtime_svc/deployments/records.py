"""Records that outlive this process: its deployments, the loads that are under way, and the id of this runtime.

The registry writes a record before it begins a load and after every change of weights, and removes it when it unloads
the deployment. SQLite makes each write atomic, even if the process is killed.
"""

from __future__ import annotations

import asyncio
import sqlite3
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from bundle.file_modes import make_private_database, make_private_directory
from bundle.process_lock import ProcessLock
from bundle.shortage import name_shortage, outlast_shortages
from runtime_svc.deployments.deployment_spec import DeploymentSpec, Origin
from runtime_svc.deployments.errors import StateInUse, StateInvalid
from runtime_svc.errors import StateUnwritable

FILE_NAME: Final = "runtime.db"
LOCK_NAME: Final = "runtime.lock"
RUNTIME_ID: Final = "runtime_id"
#: Seconds between the tries of a write while the host is short of something.
WRITE_DELAYS_S: Final = (0.05, 0.2, 0.8)

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS deployments (id TEXT PRIMARY KEY, record BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS loads (id TEXT PRIMARY KEY, record BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""


class WeightsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The weights in use: the reference of the bundle that they come from, and its digest."""

    ref: str
    digest: str


class DeploymentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """All that the next process needs in order to load a deployment again as it was."""

    spec: DeploymentSpec
    origin: Origin
    #: Digest of the bundle whose executables run.
    digest: str
    #: Cores that its ranks were placed on.
    cores: tuple[int, ...]
    #: None while weights are awaited.
    weights: WeightsRecord | None
    weight_epoch: int
    created_at_s: float


class LoadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the next process must know of a load; see `quarantine`.

    Attributes:
        spec: The deployment.
        deaths: How often the process has died over it.
        is_under_way: Whether it had begun and not ended.
    """

    spec: DeploymentSpec
    deaths: int
    is_under_way: bool


RecordT = TypeVar("RecordT", DeploymentRecord, LoadRecord)


class RecordStore:
    """The records of one state directory, which no other process can open meanwhile."""

    def __init__(self, directory: Path) -> None:
        """Opens the directory and makes it if it does not exist; `close` gives it up.

        Raises:
            StateInUse: Another runtime holds the directory.
            StateInvalid: The directory cannot be made or opened, or its database is damaged.
        """
        self._path = directory / FILE_NAME
        # One connection, used by one thread at a time.
        self._turn = asyncio.Lock()
        try:
            make_private_directory(directory)
            self._lock = ProcessLock(directory / LOCK_NAME)
        except BlockingIOError as error:
            raise StateInUse(str(directory)) from error
        except OSError as error:
            raise StateInvalid(str(directory), str(error)) from error
        try:
            make_private_database(self._path)
            self._database = sqlite3.connect(self._path, check_same_thread=False)
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.executescript(_SCHEMA)
            self.runtime_id = self._read_runtime_id()
        except (sqlite3.Error, OSError) as error:
            self._lock.release()
            raise StateInvalid(str(self._path), str(error)) from error

    def list(self) -> list[DeploymentRecord]:
        """Returns every record, sorted by deployment id.

        Raises:
            StateInvalid: A record cannot be read.
        """
        return [*self._read("SELECT record FROM deployments ORDER BY id", DeploymentRecord)]

    def list_loads(self) -> tuple[LoadRecord, ...]:
        """Returns the record of every load, sorted by deployment id.

        Raises:
            StateInvalid: A record cannot be read.
        """
        return self._read("SELECT record FROM loads ORDER BY id", LoadRecord)

    async def save(self, record: DeploymentRecord) -> None:
        """Replaces the deployment's record; the new one is on the disk when this returns.

        Raises:
            StateUnwritable: The disk does not take it.
            ResourcesShort: The host has no room for it.
        """
        row = (record.spec.deployment_id, msgspec.json.encode(record))
        await self._write("INSERT OR REPLACE INTO deployments VALUES (?, ?)", row)

    async def forget(self, deployment_id: str) -> None:
        """Removes a deployment's record, if it has one.

        Raises:
            StateUnwritable: The disk does not take it.
            ResourcesShort: The host has no room for it.
        """
        await self._write("DELETE FROM deployments WHERE id = ?", (deployment_id,))

    async def save_load(self, record: LoadRecord) -> None:
        """Replaces the record of a deployment's load; the new one is on the disk when this returns.

        Raises:
            StateUnwritable: The disk does not take it.
            ResourcesShort: The host has no room for it.
        """
        row = (record.spec.deployment_id, msgspec.json.encode(record))
        await self._write("INSERT OR REPLACE INTO loads VALUES (?, ?)", row)

    async def forget_load(self, deployment_id: str) -> None:
        """Removes the record of a deployment's load, if it has one.

        Raises:
            StateUnwritable: The disk does not take it.
            ResourcesShort: The host has no room for it.
        """
        await self._write("DELETE FROM loads WHERE id = ?", (deployment_id,))

    def close(self) -> None:
        """Gives the directory up to other processes."""
        self._database.close()
        self._lock.release()

    async def _write(self, statement: str, row: Sequence[Any]) -> None:
        async with self._turn:
            # If the caller is cancelled, the next write must still wait for this one.
            write = partial(asyncio.to_thread, self._execute, statement, row)
            writing = asyncio.ensure_future(outlast_shortages(write, WRITE_DELAYS_S))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await asyncio.wait([writing])
                raise

    def _read(self, query: str, record_type: type[RecordT]) -> tuple[RecordT, ...]:
        try:
            rows = self._database.execute(query).fetchall()
            return tuple(msgspec.json.decode(record, type=record_type) for (record,) in rows)
        except (sqlite3.Error, msgspec.DecodeError) as error:
            raise StateInvalid(str(self._path), str(error)) from error

    def _execute(self, statement: str, row: Sequence[Any]) -> None:
        try:
            with self._database:
                self._database.execute(statement, row)
        except sqlite3.Error as error:
            raise name_shortage(error) or StateUnwritable(self._path.name, str(error)) from error

    def _read_runtime_id(self) -> str:
        with self._database:
            self._database.execute("INSERT OR IGNORE INTO facts VALUES (?, ?)", (RUNTIME_ID, uuid.uuid4().hex))
        (value,) = self._database.execute("SELECT value FROM facts WHERE name = ?", (RUNTIME_ID,)).fetchone()
        return str(value)
