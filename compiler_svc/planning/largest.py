"""The largest size that fits, found by bisection."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

_MAX_SIZE: Final = 2**31 - 1


class Verdict(Enum):
    """Whether a size fits."""

    FITS = "fits"
    EXCEEDS = "exceeds"
    #: No legal configuration has this size.
    ILLEGAL = "illegal"


def find_largest(check: Callable[[int], Verdict], configured: int, *, step: int = 1) -> int:
    """Finds the largest size that fits; 0 if none does. Memory grows with the size, and no illegal size lies between
    two legal ones. `configured` is legal; `step` divides it and every legal size.
    """
    start = configured // step

    def check_steps(count: int) -> Verdict:
        return check(count * step)

    if check_steps(start) is Verdict.FITS:
        return _search_up(check_steps, start, _MAX_SIZE // step) * step
    return _search_down(check_steps, start) * step


def _search_up(check: Callable[[int], Verdict], fits: int, max_size: int) -> int:
    fails = max_size + 1
    while fits * 2 < fails:
        if check(fits * 2) is not Verdict.FITS:
            fails = fits * 2
        else:
            fits *= 2
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if check(middle) is Verdict.FITS:
            fits = middle
        else:
            fails = middle
    return fits


def _search_down(check: Callable[[int], Verdict], exceeds: int) -> int:
    # `exceeds` is legal, so an illegal size below it is too small.
    largest, low = 0, 0
    while exceeds - low > 1:
        middle = (low + exceeds) // 2
        verdict = check(middle)
        if verdict is Verdict.EXCEEDS:
            exceeds = middle
            continue
        low = middle
        if verdict is Verdict.FITS:
            largest = middle
    return largest
