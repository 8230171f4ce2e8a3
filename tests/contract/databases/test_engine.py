import threading
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from compiler_svc.database.engine import Database
from compiler_svc.errors import DatabaseUnavailable
from tests.hang_guard import HANG_S


def count_versions(session: Session) -> int:
    return int(session.execute(text("SELECT count(*) FROM versions")).scalar_one())


def insert_name(session: Session) -> None:
    session.execute(text("INSERT INTO names (name, last_version) VALUES ('a', 1)"))


async def test_work_runs_off_the_event_loop(database: Database) -> None:
    def work(_session: Session) -> int:
        return threading.get_ident()

    assert await database.run(work) != threading.get_ident()


async def test_a_transaction_that_raises_leaves_nothing(database: Database) -> None:
    def work(session: Session) -> None:
        insert_name(session)
        raise KeyError("a")

    with pytest.raises(KeyError):
        await database.run(work)
    await database.run(insert_name)


def test_another_process_reads_while_this_one_writes(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'kiln.db'}"
    first, second = Database(url), Database(url)
    entered, leave = threading.Event(), threading.Event()

    def write(session: Session) -> None:
        insert_name(session)
        entered.set()
        leave.wait(HANG_S)

    writer = threading.Thread(target=first.run_and_wait, args=(write,))
    writer.start()
    entered.wait(HANG_S)
    # The writer waits all the while, so the answer is not one that came when it had ended.
    assert second.run_and_wait(count_versions) == 0
    assert writer.is_alive()
    leave.set()
    writer.join()
    first.close()
    second.close()


@pytest.mark.parametrize(
    "url",
    ["nonsense", "oracle-of-delphi://x", "sqlite:////no/such/directory/kiln.db", "postgresql+psycopg://k:secret@db/k"],
)
def test_a_database_that_cannot_be_opened(url: str) -> None:
    with pytest.raises(DatabaseUnavailable) as caught:
        Database(url)
    assert "secret" not in str(caught.value)
