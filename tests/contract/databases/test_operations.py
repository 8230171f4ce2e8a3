import time

import pytest

from compiler_svc.database import names, operations, resumption
from compiler_svc.database.engine import Database
from compiler_svc.database.names import UNOWNED, Publisher
from compiler_svc.database.operations import Operation, State
from compiler_svc.errors import BuildFailed, NameOwned, OperationNotDone, OperationNotFound, RequestIdReused
from compiler_svc.records import CompileResult, Progress, Stage
from execution.failure import Failure
from tests.contract.databases.conftest import run

RESULT = CompileResult(
    name="a", version=1, digest="sha256:" + "0" * 64, cached=False, executables=(), warnings=("w",), duration_s=1.5
)


ALICE, BOB = Publisher("alice", takes_any=False), Publisher("bob", takes_any=False)


def create(database: Database, request_id: str | None = None, publisher: Publisher = UNOWNED) -> Operation:
    return run(
        database,
        operations.create_operation,
        name="a",
        request_id=request_id,
        request_digest="sha256:" + "1" * 64,
        spec=b"{}",
        publisher=publisher,
    )


def test_a_new_operation_is_queued(database: Database) -> None:
    operation = create(database)
    assert operation.resource_name == f"operations/{operation.operation_id}"
    assert operation.progress.stage is Stage.QUEUED
    assert not operation.is_done
    assert run(database, operations.get_operation, operation.operation_id) == operation


def test_progress_is_recorded_until_the_end(database: Database) -> None:
    operation = create(database)
    progress = Progress(stage=Stage.LOWER, executables_done=1, executables_total=4, eta_s=2.5, message="compiling")
    assert run(database, operations.update_progress, operation.operation_id, progress).progress == progress
    finished = run(database, operations.finish_operation, operation.operation_id, RESULT)
    assert finished.state is State.SUCCEEDED
    assert finished.result == RESULT
    assert finished.progress.stage is Stage.DONE
    assert finished.progress.executables_total == 4
    assert run(database, operations.update_progress, operation.operation_id, progress) == finished


def test_an_operation_ends_once(database: Database) -> None:
    operation = create(database)
    error = Failure.of(BuildFailed("it fell"))
    failed = run(database, operations.finish_operation, operation.operation_id, error)
    assert failed.state is State.FAILED
    assert failed.error == error
    assert run(database, operations.finish_operation, operation.operation_id, RESULT) == failed


def test_a_request_id_finds_its_operation(database: Database) -> None:
    operation = create(database, "r")
    assert run(database, operations.find_by_request_id, "r", "sha256:" + "1" * 64) == operation
    assert run(database, operations.find_by_request_id, "s", "sha256:" + "1" * 64) is None
    with pytest.raises(RequestIdReused) as caught:
        run(database, operations.find_by_request_id, "r", "sha256:" + "2" * 64)
    assert caught.value.metadata == {"request_id": "r", "operation": operation.resource_name}


def test_pages_are_newest_first(database: Database) -> None:
    created = [create(database).operation_id for _ in range(5)]
    run(database, operations.finish_operation, created[0], RESULT)
    found: list[str] = []
    after = None
    while True:
        page = run(database, operations.list_operations, done=None, page_size=2, after=after)
        found += [operation.operation_id for operation in page.operations]
        if (after := page.next_key) is None:
            break
    assert found == created[::-1]
    finished = run(database, operations.list_operations, done=True, page_size=9, after=None)
    assert [operation.operation_id for operation in finished.operations] == created[:1]
    running = run(database, operations.list_operations, done=False, page_size=9, after=None)
    assert len(running.operations) == 4


def test_only_finished_operations_are_deleted(database: Database) -> None:
    operation = create(database, "r")
    with pytest.raises(OperationNotDone):
        run(database, operations.delete_operation, operation.operation_id)
    run(database, operations.finish_operation, operation.operation_id, RESULT)
    run(database, operations.delete_operation, operation.operation_id)
    with pytest.raises(OperationNotFound) as caught:
        run(database, operations.get_operation, operation.operation_id)
    assert caught.value.metadata == {"operation": operation.resource_name}
    assert create(database, "r").operation_id != operation.operation_id


@pytest.mark.parametrize("name", ["", "operations", "operations/", "compiles/1", "1"])
def test_names_of_another_form_name_nothing(name: str) -> None:
    with pytest.raises(OperationNotFound):
        operations.parse_resource_name(name)


def test_a_restart_finds_what_was_running_in_order(url: str) -> None:
    before = Database(url)
    finished, first, second = create(before), create(before), create(before)
    run(before, operations.finish_operation, finished.operation_id, RESULT)
    run(before, resumption.begin_build, first.operation_id, "b")
    run(before, operations.request_cancel, second.operation_id)
    before.close()

    after = Database(url)
    assert run(after, operations.get_operation, finished.operation_id).result == RESULT
    found = run(after, resumption.list_unfinished)
    assert [one.operation.operation_id for one in found] == [first.operation_id, second.operation_id]
    assert [one.spec for one in found] == [b"{}"] * 2
    assert [(one.unfinished_builds, one.build_id, one.is_cancelled) for one in found] == [
        (1, "b", False),
        (0, None, True),
    ]
    resumed = run(after, resumption.resume_operation, first.operation_id)
    assert (resumed.progress.stage, resumed.progress.message) == (Stage.QUEUED, "resumed after a restart, attempt 2")
    run(after, resumption.stop_build, first.operation_id)
    assert run(after, resumption.list_unfinished)[0].unfinished_builds == 0
    after.close()


def test_finished_operations_are_forgotten_by_number_and_age(database: Database) -> None:
    created = [create(database, str(number)).operation_id for number in range(6)]
    for operation_id in created[:5]:
        run(database, operations.finish_operation, operation_id, RESULT)
    assert run(database, operations.forget_finished, keep=5, older_than_ns=0) == 0
    assert run(database, operations.forget_finished, keep=3, older_than_ns=0) == 2
    with pytest.raises(OperationNotFound):
        run(database, operations.get_operation, created[1])
    assert run(database, operations.get_operation, created[2]).is_done
    assert run(database, operations.forget_finished, keep=3, older_than_ns=time.time_ns()) == 3
    assert not run(database, operations.get_operation, created[5]).is_done
    assert run(database, operations.find_by_request_id, "0", "sha256:" + "1" * 64) is None


def test_operations_and_request_ids_are_their_publishers_own(database: Database) -> None:
    of_alice, of_bob, unowned = (create(database, "r", one) for one in (ALICE, BOB, UNOWNED))
    assert len({one.operation_id for one in (of_alice, of_bob, unowned)}) == 3
    digest = "sha256:" + "1" * 64
    for principal, own in (("alice", of_alice), ("bob", of_bob), ("", unowned)):
        assert run(database, operations.find_by_request_id, "r", digest, principal) == own
        for operation in (of_alice, of_bob, unowned):
            for work in (operations.get_operation, operations.request_cancel):
                if operation is own:
                    assert run(database, work, operation.operation_id, principal).publisher.principal == principal
                else:
                    with pytest.raises(OperationNotFound):
                        run(database, work, operation.operation_id, principal)
        listed = run(database, operations.list_operations, done=None, page_size=9, after=None, reach=principal)
        assert [one.operation_id for one in listed.operations] == [own.operation_id]
    everyones = run(database, operations.list_operations, done=None, page_size=9, after=None)
    assert len(everyones.operations) == 3
    assert run(database, operations.get_operation, of_bob.operation_id, None).publisher == BOB


def test_an_operation_for_the_name_of_another_is_refused(database: Database) -> None:
    run(database, names.claim_name, "a", ALICE)
    with pytest.raises(NameOwned):
        create(database, publisher=BOB)
    assert create(database, publisher=ALICE)
    assert create(database, publisher=Publisher("carol", takes_any=True))
