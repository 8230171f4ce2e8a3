"""Records that outlive this process: its deployments, the loads that are under way, and the id of this runtime.

The registry writes a record before it begins a load and after every change of weights, and removes it when it unloads
the deployment. An adapter that LoadAdapter has loaded has a record of its own, which goes with its deployment's.
SQLite makes each write atomic, even if the process is killed.
"""

from __future__ import annotations

import asyncio
import sqlite3
import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

from bundle.host.file_modes import make_private_database, make_private_directory
from bundle.host.process_lock import ProcessLock
from bundle.host.shortage import name_shortage, outlast_shortages
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
CREATE TABLE IF NOT EXISTS adapters (id TEXT PRIMARY KEY, record BLOB NOT NULL) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS forget_adapters AFTER DELETE ON deployments BEGIN
  DELETE FROM adapters WHERE substr(id, 1, length(old.id) + 1) = old.id || char(10);
END;
"""


class WeightsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The weights in use: the reference of the bundle that they come from, its digest, and its version if known."""

    ref: str
    digest: str
    version: str = ""


class AdapterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that a name means: the adapter's digest, and the reference and digest of the bundle that it is from.

    `owner` is the key of the principal who has loaded it. It is None if the adapter is in the deployment's own bundle,
    which serves all and is in no file of records; the reference is empty then.
    """

    deployment_id: str
    owner: str | None
    name: str
    digest: str
    ref: str = ""
    bundle_digest: str

    @property
    def key(self) -> str:
        """What the engine knows it by. Ids and names have no line breaks."""
        return "\n".join((self.deployment_id, self.name, *([] if self.owner is None else [self.owner])))


class DeploymentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """All that the next process needs in order to load a deployment again as it was."""

    spec: DeploymentSpec
    origin: Origin
    #: Digest of the bundle whose executables run.
    digest: str
    #: The version as which it was found; empty if its source told none, and from earlier releases.
    version: str = ""
    #: Cores that its ranks were placed on.
    cores: tuple[int, ...]
    #: None while weights are awaited.
    weights: WeightsRecord | None
    weight_epoch: int
    created_at_s: float

    @property
    def key(self) -> str:
        """Id of the deployment."""
        return self.spec.deployment_id


class LoadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the next process must know of a load; `deaths` counts how often the process has died over it.

    See `quarantine`. `weights_digest` names the bundle whose weights a deployment that serves loads, because its alias
    has moved; it is empty for the load of the deployment itself.
    """

    spec: DeploymentSpec
    deaths: int
    is_under_way: bool
    weights_digest: str = ""

    @property
    def key(self) -> str:
        """Id of the deployment, and the digest of the weights if it is a load of weights."""
        return " ".join(filter(None, (self.spec.deployment_id, self.weights_digest)))


RecordT = TypeVar("RecordT", bound=DeploymentRecord | AdapterRecord | LoadRecord)


class RecordTable(Generic[RecordT]):
    """The records of one kind, by their keys."""

    def __init__(
        self,
        name: str,
        record_type: type[RecordT],
        read: Callable[[str, type[RecordT]], tuple[RecordT, ...]],
        write: Callable[[str, Sequence[Any]], Awaitable[None]],
    ) -> None:
        self._name = name
        self._record_type = record_type
        self._read = read
        self._write = write

    def list(self) -> tuple[RecordT, ...]:
        """Returns every record, sorted by key."""
        return self._read(f"SELECT record FROM {self._name} ORDER BY id", self._record_type)

    async def save(self, record: RecordT) -> None:
        """Replaces the record of the same key; the new one is on the disk when this returns."""
        row = (record.key, msgspec.json.encode(record))
        # Not INSERT OR REPLACE, which deletes the row first.
        change = "ON CONFLICT (id) DO UPDATE SET record = excluded.record"
        await self._write(f"INSERT INTO {self._name} VALUES (?, ?) {change}", row)

    async def forget(self, key: str) -> None:
        """Removes the record of a key, if there is one."""
        await self._write(f"DELETE FROM {self._name} WHERE id = ?", (key,))


class RecordStore:
    """The records of one state directory, which no other process can open meanwhile."""

    def __init__(self, directory: Path) -> None:
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
        self.deployments = RecordTable("deployments", DeploymentRecord, self._read, self._write)
        self.adapters = RecordTable("adapters", AdapterRecord, self._read, self._write)
        self.loads = RecordTable("loads", LoadRecord, self._read, self._write)

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
