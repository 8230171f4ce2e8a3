"""How the threads of a rank wait for each other."""

from __future__ import annotations

from typing import Final

#: Turns that a thread spins for before it sleeps. A step has some hundred parallel regions, microseconds apart: to be
#: woken costs more than the wait is long (measured on an idle virtual machine: a step of 19 ms takes 26). But who spins
#: on takes the core from those who have work: on a busy host, steps grow with the turns (300: 36 ms, 5000: 105 ms). A
#: turn takes some 0.2 µs there, a tenth of that on bare metal.
SPIN_TURNS: Final = 300


def thread_environment(num_threads: int) -> dict[str, str]:
    """Environment variables for a process that computes with so many threads; read when torch is loaded."""
    return {"OMP_NUM_THREADS": str(num_threads), "GOMP_SPINCOUNT": str(SPIN_TURNS)}
