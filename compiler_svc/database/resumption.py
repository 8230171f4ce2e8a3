"""Records with which a restarted compiler resumes operations. Functions take the session of the caller's transaction.

An operation counts its builds that the compiler started but neither finished nor stopped in an orderly way, because a
build that crashes the compiler every time must not start forever.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from compiler_svc.database.operations import Operation, State, read_operation
from compiler_svc.database.tables import OperationRow
from compiler_svc.records import Progress, Stage


@dataclass(frozen=True)
class Unfinished:
    """An operation that a former process left unfinished. Its `spec` is what `create_operation` recorded, None if the
    tables were too old to store it; the compiler crashed during `unfinished_builds` of its builds.
    """

    operation: Operation
    spec: bytes | None
    unfinished_builds: int
    build_id: str | None
    is_cancelled: bool


def list_unfinished(session: Session) -> list[Unfinished]:
    """Lists running operations, oldest first."""
    query = select(OperationRow).where(OperationRow.state == State.RUNNING)
    rows = session.scalars(query.order_by(OperationRow.create_time_ns, OperationRow.operation_id))
    return [
        Unfinished(read_operation(row), row.spec, row.unfinished_builds, row.build_id, row.is_cancelled) for row in rows
    ]


def resume_operation(session: Session, operation_id: str) -> Operation:
    """Queues an operation again as its next attempt."""
    row = session.get_one(OperationRow, operation_id)
    row.attempt += 1
    row.progress = Progress(stage=Stage.QUEUED, message=f"resumed after a restart, attempt {row.attempt}").to_json()
    return read_operation(row)


def begin_build(session: Session, operation_id: str, build_id: str) -> str | None:
    """Counts a build before it starts, as a crashed compiler cannot; returns the former attempt's build, if any."""
    row = session.get_one(OperationRow, operation_id)
    former = row.build_id
    row.unfinished_builds += 1
    row.build_id = build_id
    return former


def stop_build(session: Session, operation_id: str) -> None:
    """Takes a build off the count, when the compiler stops in an orderly way."""
    row = session.get_one(OperationRow, operation_id)
    row.unfinished_builds -= 1
