from __future__ import annotations

import pytest

from execution.threads import (
    LONG_SPIN_TURNS,
    SHORT_SPIN_TURNS,
    choose_spin_turns,
    count_processors,
    thread_environment,
)


@pytest.mark.parametrize(
    ("num_threads", "num_processors", "turns"),
    [
        (1, 1, LONG_SPIN_TURNS),
        (2, 2, LONG_SPIN_TURNS),
        (2, 64, LONG_SPIN_TURNS),
        (2, 1, SHORT_SPIN_TURNS),
        (65, 64, SHORT_SPIN_TURNS),
    ],
)
def test_threads_spin_for_long_where_each_has_a_processor(num_threads: int, num_processors: int, turns: int) -> None:
    assert choose_spin_turns(num_threads, num_processors) == turns


def test_all_ranks_threads_count() -> None:
    num_processors = count_processors()
    fits = thread_environment(1, num_ranks=num_processors)
    assert fits == {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": str(LONG_SPIN_TURNS)}
    crowded = thread_environment(2, num_ranks=num_processors)
    assert crowded == {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": str(SHORT_SPIN_TURNS)}
