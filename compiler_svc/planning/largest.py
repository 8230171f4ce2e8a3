"""The largest size that fits, by bisection on a judgement."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

_LARGEST: Final = 2**31 - 1


class Judgement(Enum):
    """What becomes of a size."""

    FITS = "fits"
    EXCEEDS = "exceeds"
    #: No legal configuration has this size.
    ILLEGAL = "illegal"


def find_largest(judge: Callable[[int], Judgement], configured: int, *, step: int = 1) -> int:
    """The largest size that fits; 0 where none does.

    Args:
        judge: Judges a size. Memory grows with the size, and legal sizes are neighbours of one another.
        configured: A legal size.
        step: Legal sizes are multiples of it; so is `configured`.
    """
    start = configured // step

    def judge_steps(count: int) -> Judgement:
        return judge(count * step)

    if judge_steps(start) is Judgement.FITS:
        return _search_up(judge_steps, start, _LARGEST // step) * step
    return _search_down(judge_steps, start) * step


def _search_up(judge: Callable[[int], Judgement], fits: int, most: int) -> int:
    fails = most + 1
    while fits * 2 < fails:
        if judge(fits * 2) is not Judgement.FITS:
            fails = fits * 2
        else:
            fits *= 2
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if judge(middle) is Judgement.FITS:
            fits = middle
        else:
            fails = middle
    return fits


def _search_down(judge: Callable[[int], Judgement], exceeds: int) -> int:
    # Below a legal size that is too large: what is illegal there is too small.
    largest, low = 0, 0
    while exceeds - low > 1:
        middle = (low + exceeds) // 2
        judgement = judge(middle)
        if judgement is Judgement.EXCEEDS:
            exceeds = middle
            continue
        low = middle
        if judgement is Judgement.FITS:
            largest = middle
    return largest
