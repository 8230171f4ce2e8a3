"""What a restarted compiler has to know of the operations that the former process left running.

An operation counts the builds that it began and that neither ended nor were stopped in good order: one that takes the
compiler down each time must not be begun for ever. Functions take the session of the caller's transaction.
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
    """An operation that a former process left running.

    Attributes:
        spec: What `create_operation` was given; None where the tables had no place for it yet.
        unfinished_builds: Builds of it that the compiler did not survive.
        build_id: The latest of them.
        is_cancelled: A client has asked for it to be cancelled.
    """

    operation: Operation
    spec: bytes | None
    unfinished_builds: int
    build_id: str | None
    is_cancelled: bool


def list_unfinished(session: Session) -> list[Unfinished]:
    """Operations that run, oldest first."""
    query = select(OperationRow).where(OperationRow.state == State.RUNNING)
    rows = session.scalars(query.order_by(OperationRow.create_time_ns, OperationRow.operation_id))
    return [
        Unfinished(read_operation(row), row.spec, row.unfinished_builds, row.build_id, row.is_cancelled) for row in rows
    ]


def resume_operation(session: Session, operation_id: str) -> Operation:
    """Queues an operation again: one attempt more."""
    row = session.get_one(OperationRow, operation_id)
    row.attempt += 1
    row.progress = Progress(stage=Stage.QUEUED, message=f"resumed after a restart, attempt {row.attempt}").to_json()
    return read_operation(row)


def begin_build(session: Session, operation_id: str, build_id: str) -> str | None:
    """Counts a build in advance, because a compiler that it kills cannot count it afterwards.

    Returns:
        The build of the attempt before, None where there was none.
    """
    row = session.get_one(OperationRow, operation_id)
    former = row.build_id
    row.unfinished_builds += 1
    row.build_id = build_id
    return former


def stop_build(session: Session, operation_id: str) -> None:
    """Takes back what `begin_build` counted, for a compiler that stops in good order."""
    row = session.get_one(OperationRow, operation_id)
    row.unfinished_builds -= 1
