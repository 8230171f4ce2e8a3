"""A share of the slow tests: what changed goes first, then what failed, then what waited longest; no more than fits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.turns.choice import NUM_TURNS, TURN_S, choose_files, find_touched, sources_of
from tests.turns.record import MIN_LIMIT_S, NEW_LIMIT_S, UNKNOWN_S, FileResult, Record, last_runs, limit_of

FILES = [f"tests/system/test_{letter}.py" for letter in "abcdefghijklmnopqrst"]
A, B, C, D = FILES[:4]
LONG_S = 1e6


def ran(file: str, day: int, *, seconds: float = 10.0, num_due: int = 0, failed: tuple[str, ...] = ()) -> FileResult:
    return FileResult(file, f"2026-11-{day:02}T04:00:00+00:00", "abc", seconds, 3, 0, num_due, failed)


def choose(
    *results: FileResult,
    files: list[str] = FILES[:4],
    touched: Iterable[str] = (),
    day: int = 0,
    budget_s: float = LONG_S,
) -> list[str]:
    return choose_files(files, results, set(touched), day=day, budget_s=budget_s)


def test_what_waited_longest_goes_first() -> None:
    assert choose(ran(A, 3), ran(B, 1), ran(D, 2)) == [C, B, D, A]


def test_what_changed_goes_before_what_failed_and_what_waited() -> None:
    assert choose(ran(A, 4), ran(B, 3, failed=("test_one",)), ran(D, 2), touched=[A]) == [A, B, C, D]


def test_times_add_up_to_the_budget_at_most() -> None:
    results = ran(A, 1, seconds=50), ran(B, 2, seconds=60), ran(D, 3, seconds=40)
    assert choose(*results, files=[A, B, D], budget_s=90) == [A, D]
    assert choose(*results, files=[A, B, D], budget_s=89) == [A]
    assert choose(ran(A, 1), files=[A, C], budget_s=10 + UNKNOWN_S) == [C, A]
    assert choose(ran(A, 1), files=[A, C], budget_s=9 + UNKNOWN_S) == [C]
    assert choose(ran(A, 1), budget_s=-1) == []


def test_what_takes_longer_than_a_turn_runs_by_itself_only() -> None:
    assert choose(ran(A, 1, seconds=TURN_S), ran(B, 1, seconds=TURN_S + 1), files=[A, B], touched=[B]) == [A]
    hung = replace(ran(A, 1, seconds=TURN_S / 2), has_hung=True)
    assert choose(hung, ran(B, 1))[0] == A
    assert A not in choose(hung, ran(A, 2, seconds=TURN_S - 1, num_due=1), ran(B, 1))


def test_without_results_each_file_has_one_day_of_five() -> None:
    days = [choose(files=FILES, day=day) for day in range(NUM_TURNS, 2 * NUM_TURNS)]
    assert sorted(file for day in days for file in day) == FILES
    assert max(map(len, days)) <= len(FILES) // 2
    assert choose(files=FILES, day=NUM_TURNS) == choose(files=FILES, day=0)


def test_without_results_what_changed_runs_on_every_day() -> None:
    assert [choose(files=FILES, day=day, touched=[C])[0] for day in range(NUM_TURNS)] == [C] * NUM_TURNS


def test_without_results_each_file_is_first_in_time_where_all_changed() -> None:
    share = [choose(files=FILES, day=day, touched=FILES, budget_s=9 * UNKNOWN_S) for day in range(NUM_TURNS)]
    assert set().union(*share) == set(FILES)


@pytest.mark.parametrize(
    ("changed", "touched"),
    [
        ("tests/service/compiler_svc/lower/test_linear.py", "tests/service/compiler_svc/lower/test_linear.py"),
        ("tests/system/kills/runtime_matrix.py", "tests/system/kills/test_runtime_kills.py"),
        ("compiler_svc/lower/neuron/limits.py", "tests/service/compiler_svc/lower/test_linear.py"),
        ("bundle/store/tags.py", "tests/system/kills/test_compiler_kills.py"),
        ("clients/python/kiln_client/cli/run.py", "tests/system/clients/test_run.py"),
        ("docker-compose.yml", "tests/system/deploy/test_images.py"),
    ],
)
def test_changes_touch_the_tests_of_their_room(changed: str, touched: str) -> None:
    assert find_touched([touched, "tests/system/test_deployments.py"], [changed]) == {touched}


@pytest.mark.parametrize(
    "changed",
    [
        "tests/service/compiler_svc/lower/test_aoti.py",
        "tests/service/compiler_svc/lower/neuron/test_limits.py",
        "compiler_svc/lower_case.py",
        "bundle/store/tags.py",
        "docs/models.md",
    ],
)
def test_other_changes_touch_nothing(changed: str) -> None:
    assert find_touched(["tests/service/compiler_svc/lower/test_linear.py"], [changed]) == set()


def test_a_file_of_no_room_is_touched_by_what_is_beside_it() -> None:
    file = "tests/system/odd/test_x.py"
    assert sources_of(file) == ()
    assert find_touched([file], ["tests/system/odd/actions.py"]) == {file}
    assert find_touched([file], ["tests/system/test_serving.py", "edge/status.py"]) == set()


def test_last_runs_are_whole_and_other_lines_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "kept/slow-tests.jsonl"
    record = Record(path, FileResult)
    assert record.read() == []
    for result in (ran(A, 1), ran(B, 1), ran(A, 2), ran(A, 3, num_due=1)):
        record.add(result)
    path.write_bytes(b'[]\n{"file": 1}\n\xff\n' + path.read_bytes() + b'{"file": "tests/system/te')
    assert last_runs(record.read()) == {A: ran(A, 2), B: ran(B, 1)}
    assert len(record.read()) == 4


def test_limits_follow_the_longest_run_and_double_with_a_hang() -> None:
    results = [ran(A, 1, seconds=300), ran(A, 2, seconds=200), ran(B, 1, seconds=4), ran(C, 1, seconds=9, num_due=1)]
    assert [limit_of(file, results) for file in (A, B, C)] == [450, MIN_LIMIT_S, NEW_LIMIT_S]
    assert limit_of(A, [*results, replace(ran(A, 3, seconds=450), has_hung=True)]) == 900
