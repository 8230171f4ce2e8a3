"""Compile operations in the database. Functions take the session of the caller's transaction."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from enum import StrEnum

import msgspec
from sqlalchemy import delete, or_, select, tuple_
from sqlalchemy.orm import Session

from compiler_svc.database.names import UNOWNED, Publisher, check_name
from compiler_svc.database.tables import OperationRow
from compiler_svc.errors import OperationNotDone, OperationNotFound, RequestIdReused
from compiler_svc.records import OperationResult, Progress, Stage, read_result
from execution.failure import Failure


class State(StrEnum):
    """The state of an operation. Queued operations count as running."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


@dataclass(frozen=True)
class Operation:
    """One compile operation. A finished operation has a result or an error; it belongs to its publisher."""

    operation_id: str
    publisher: Publisher
    name: str
    state: State
    progress: Progress
    result: OperationResult | None
    error: Failure | None
    create_time_ns: int
    update_time_ns: int

    @property
    def resource_name(self) -> str:
        """The name `operations/ID`, by which clients refer to the operation."""
        return f"operations/{self.operation_id}"

    @property
    def is_done(self) -> bool:
        """Whether the operation has ended, with a result or an error."""
        return self.state is not State.RUNNING


@dataclass(frozen=True)
class PageOfOperations:
    """A page of operations, newest first, and the key of the next page."""

    operations: tuple[Operation, ...]
    next_key: tuple[int, str] | None


def parse_resource_name(name: str) -> str:
    """Reads the id from `operations/ID`."""
    prefix, _, operation_id = name.partition("/")
    if prefix != "operations" or not operation_id:
        raise OperationNotFound(name)
    return operation_id


def find_by_request_id(session: Session, request_id: str, request_digest: str, principal: str = "") -> Operation | None:
    """Finds the operation that a principal's request id belongs to."""
    row = session.scalar(select(OperationRow).where(OperationRow.request_id == _own(request_id, principal)))
    if row is None:
        return None
    if row.request_digest != request_digest:
        raise RequestIdReused(request_id, f"operations/{row.operation_id}")
    return read_operation(row)


def create_operation(
    session: Session,
    *,
    name: str,
    request_id: str | None,
    request_digest: str,
    spec: bytes,
    publisher: Publisher = UNOWNED,
) -> Operation:
    """Records an accepted compile, with the job spec with which a restarted compiler resumes it. Call
    `find_by_request_id` first, because a request id has one operation.
    """
    check_name(session, name, publisher)
    now_ns = time.time_ns()
    row = OperationRow(
        operation_id=uuid.uuid4().hex,
        name=name,
        request_id=None if request_id is None else _own(request_id, publisher.principal),
        request_digest=request_digest,
        state=State.RUNNING,
        progress=Progress(stage=Stage.QUEUED, message="accepted").to_json(),
        create_time_ns=now_ns,
        update_time_ns=now_ns,
        spec=spec,
        attempt=1,
        unfinished_builds=0,
        is_cancelled=False,
        principal=publisher.principal,
        takes_any_name=publisher.takes_any,
    )
    session.add(row)
    return read_operation(row)


def get_operation(session: Session, operation_id: str, reach: str | None = None) -> Operation:
    """Reads one operation, which must be of the principal `reach`; None for anybody's, see `Principal.reach`."""
    return read_operation(_get_row(session, operation_id, reach))


def list_operations(
    session: Session, *, done: bool | None, page_size: int, after: tuple[int, str] | None, reach: str | None = None
) -> PageOfOperations:
    """Lists operations, newest first: only finished ones if `done`, only running ones if it is False, all if it is
    None. `after` is the `next_key` of the page before.
    """
    key = tuple_(OperationRow.create_time_ns, OperationRow.operation_id)
    query = select(OperationRow).order_by(OperationRow.create_time_ns.desc(), OperationRow.operation_id.desc())
    if reach is not None:
        query = query.where(OperationRow.principal == reach)
    if done is not None:
        running = OperationRow.state == State.RUNNING
        query = query.where(~running if done else running)
    if after is not None:
        query = query.where(key < tuple_(*after))
    rows = session.scalars(query.limit(page_size + 1)).all()
    page = tuple(map(read_operation, rows[:page_size]))
    more = len(rows) > page_size
    return PageOfOperations(page, (page[-1].create_time_ns, page[-1].operation_id) if more else None)


def update_progress(session: Session, operation_id: str, progress: Progress) -> Operation:
    """Records an operation's progress. Leaves a finished operation as it is."""
    row = _get_row(session, operation_id)
    if row.state == State.RUNNING:
        row.progress = progress.to_json()
        row.update_time_ns = time.time_ns()
    return read_operation(row)


def finish_operation(session: Session, operation_id: str, outcome: OperationResult | Failure) -> Operation:
    """Ends an operation. Leaves a finished operation as it is."""
    row = _get_row(session, operation_id)
    if row.state == State.RUNNING:
        _finish(row, outcome)
    return read_operation(row)


def delete_operation(session: Session, operation_id: str) -> None:
    """Removes a finished operation together with its request id."""
    row = _get_row(session, operation_id)
    if row.state == State.RUNNING:
        raise OperationNotDone(f"operations/{operation_id}")
    session.delete(row)


def request_cancel(session: Session, operation_id: str, reach: str | None = None) -> Operation:
    """Records that a client cancelled an operation. The record outlives a restart."""
    row = _get_row(session, operation_id, reach)
    row.is_cancelled = True
    return read_operation(row)


def forget_finished(session: Session, *, keep: int, older_than_ns: int) -> int:
    """Removes finished operations together with their request ids, but for those among the newest `keep` that have not
    ended before `older_than_ns`; returns how many.
    """
    finished = OperationRow.state != State.RUNNING
    newest_first = select(OperationRow.create_time_ns).where(finished).order_by(OperationRow.create_time_ns.desc())
    first_surplus = session.scalar(newest_first.offset(keep).limit(1))
    surplus = OperationRow.create_time_ns <= (-1 if first_surplus is None else first_surplus)
    outdated = delete(OperationRow).where(finished, or_(surplus, OperationRow.update_time_ns < older_than_ns))
    return len(session.scalars(outdated.returning(OperationRow.operation_id)).all())


def _own(request_id: str, principal: str) -> str:
    """Returns what no other principal's request id is; ids of callers without a name stay what they are."""
    return json.dumps([principal, request_id]) if principal else request_id


def _get_row(session: Session, operation_id: str, reach: str | None = None) -> OperationRow:
    row = session.get(OperationRow, operation_id)
    if row is None or reach not in {None, row.principal}:
        raise OperationNotFound(f"operations/{operation_id}")
    return row


def _finish(row: OperationRow, outcome: OperationResult | Failure) -> None:
    succeeded = not isinstance(outcome, Failure)
    row.state = State.SUCCEEDED if succeeded else State.FAILED
    if succeeded:
        row.result = msgspec.json.encode(outcome)
    else:
        row.error = msgspec.json.encode(outcome)
    progress = msgspec.json.decode(row.progress, type=Progress)
    done = msgspec.structs.replace(progress, stage=Stage.DONE, eta_s=None, message="done" if succeeded else "failed")
    row.progress = done.to_json()
    row.update_time_ns = time.time_ns()


def read_operation(row: OperationRow) -> Operation:
    """Reads the record in a row."""
    return Operation(
        operation_id=row.operation_id,
        publisher=Publisher(row.principal, row.takes_any_name),
        name=row.name,
        state=State(row.state),
        progress=msgspec.json.decode(row.progress, type=Progress),
        result=None if row.result is None else read_result(row.result),
        error=None if row.error is None else msgspec.json.decode(row.error, type=Failure),
        create_time_ns=row.create_time_ns,
        update_time_ns=row.update_time_ns,
    )
