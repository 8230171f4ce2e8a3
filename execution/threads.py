"""Settings of how the threads of a rank wait for each other."""

from __future__ import annotations

import os
from typing import Final

#: Turns that a thread spins before it sleeps, if every thread has a processor. A step has tens of parallel regions,
#: microseconds apart, and waking a thread takes longer than the wait. With about a hundred of them, on an idle virtual
#: machine of two cores, with about 0.2 µs per turn, a step of two threads took 26 ms if threads slept at once and 19 ms
#: if they spun.
LONG_SPIN_TURNS: Final = 2000

#: Turns if threads share processors. A thread that spins takes the processor from threads that have work: with all
#: processors kept busy by other processes, a step took 32 ms if threads slept at once, 36 ms with 300 turns, 43 ms with
#: 1000 and 105 ms with 5000.
SHORT_SPIN_TURNS: Final = 300


def count_processors() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def choose_spin_turns(num_threads: int, num_processors: int) -> int:
    """Chooses how many turns threads spin; `num_threads` of all processes may compute at the same time."""
    return LONG_SPIN_TURNS if num_threads <= num_processors else SHORT_SPIN_TURNS


def thread_environment(num_threads: int, *, num_ranks: int) -> dict[str, str]:
    """Environment of one of `num_ranks` processes that may compute at the same time. torch reads it when loaded."""
    spin_turns = choose_spin_turns(num_ranks * num_threads, count_processors())
    return {"OMP_NUM_THREADS": str(num_threads), "GOMP_SPINCOUNT": str(spin_turns)}
