import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from compiler_svc.database import leases
from compiler_svc.database.engine import Database
from compiler_svc.database.leases import Lease
from tests.contract.databases.conftest import run

DIGESTS = tuple("sha256:" + letter * 64 for letter in "123")
NOW_NS = 10**18


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The time in nanoseconds, for tests to move."""
    now = [NOW_NS]
    monkeypatch.setattr(time, "time_ns", lambda: now[0])
    return now


def lease(database: Database, holder: str, digest: str, duration_s: float = 10) -> Lease:
    return run(database, leases.set_lease, holder=holder, digest=digest, duration_s=duration_s)


def release(database: Database, holder: str, digest: str = "") -> int:
    return run(database, leases.release_leases, holder=holder, digest=digest)


def listed(database: Database, digest: str = "") -> list[tuple[str, str]]:
    return [(one.digest, one.holder) for one in run(database, leases.list_leases, digest)]


def test_leases_come_by_digest_and_holder(database: Database) -> None:
    made = [lease(database, holder, digest) for holder in "ba" for digest in reversed(DIGESTS[:2])]
    assert made[0] == Lease("b", DIGESTS[1], NOW_NS + 10**10)
    assert listed(database) == [(digest, holder) for digest in DIGESTS[:2] for holder in "ab"]
    assert listed(database, DIGESTS[0]) == [(DIGESTS[0], "a"), (DIGESTS[0], "b")]
    assert database.run_and_wait(leases.list_leased_digests) == set(DIGESTS[:2])


def test_a_holder_has_one_lease_on_a_bundle_and_renews_it(database: Database, clock: list[int]) -> None:
    lease(database, "a", DIGESTS[0], 10)
    clock[0] += 9 * 10**9
    assert lease(database, "a", DIGESTS[0], 10).expire_time_ns == NOW_NS + 19 * 10**9
    clock[0] += 9 * 10**9
    assert listed(database) == [(DIGESTS[0], "a")]
    clock[0] += 10**9
    assert listed(database) == []
    assert database.run_and_wait(leases.list_leased_digests) == frozenset()


def test_releasing_one_or_all_of_a_holder(database: Database, clock: list[int]) -> None:
    for digest in DIGESTS:
        lease(database, "a", digest)
    lease(database, "b", DIGESTS[0], 5)
    assert release(database, "a", DIGESTS[0]) == 1
    assert release(database, "a", DIGESTS[0]) == 0
    assert release(database, "a") == 2
    assert listed(database) == [(DIGESTS[0], "b")]
    clock[0] += 6 * 10**9
    assert release(database, "b") == 0


def test_processes_lease_at_once(tmp_path: Path) -> None:
    """As builds do beside the service, the same bundle among others."""
    others = [Database(f"sqlite:///{tmp_path}/shared.db") for _ in range(3)]
    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(lease, others[number % 3], "kiln/build", DIGESTS[number % 2]) for number in range(60)]
        assert {future.result().holder for future in futures} == {"kiln/build"}
    assert listed(others[0]) == [(digest, "kiln/build") for digest in DIGESTS[:2]]
    for other in others:
        other.close()
