"""How the threads of a rank wait for each other."""

from __future__ import annotations

import os
from typing import Final

#: Turns that a thread spins for before it sleeps, where every thread has a processor. A step has some hundred parallel
#: regions, microseconds apart, and waking a thread costs more than the wait is long: on an idle virtual machine of two
#: cores, where a turn takes some 0.2 µs, a step of two threads takes 26 ms with threads that sleep at once and 19 with
#: threads that spin.
LONG_SPIN_TURNS: Final = 2000

#: The same where threads share processors. Who spins on takes the processor from those who have work: with all
#: processors kept busy by others, a step took 32 ms with threads that sleep at once, 36 ms with 300 turns, 43 with 1000
#: and 105 with 5000.
SHORT_SPIN_TURNS: Final = 300


def count_processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def choose_spin_turns(num_threads: int, num_processors: int) -> int:
    """How long threads spin, by how many may compute at the same time, in all processes, and on how many processors."""
    return LONG_SPIN_TURNS if num_threads <= num_processors else SHORT_SPIN_TURNS


def thread_environment(num_threads: int, *, num_ranks: int) -> dict[str, str]:
    """Environment variables for a process that computes; read when torch is loaded.

    Args:
        num_threads: Threads of the process.
        num_ranks: Processes with so many threads that may compute at the same time, this one included.
    """
    spin_turns = choose_spin_turns(num_ranks * num_threads, count_processors())
    return {"OMP_NUM_THREADS": str(num_threads), "GOMP_SPINCOUNT": str(spin_turns)}
