"""A row of the kill matrices: what runs, and who dies or hangs in the middle of it."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import pytest

#: The victim that stands for the operation itself, which is cancelled.
OPERATION: Final = "operation"

P = TypeVar("P")


@dataclass(frozen=True)
class Death(Generic[P]):
    """One death, or another signal.

    Attributes:
        victim: Name of the process; the matrices say which words stand for others.
        point: When it gets the signal.
        reason: With which the action then ends; if empty, with any that the matrix has for the victim, or none.
    """

    victim: str
    point: P
    number: signal.Signals = signal.SIGKILL
    reason: str = ""

    def __str__(self) -> str:
        how = "" if self.number == signal.SIGKILL else f" {self.number.name}"
        return f"{self.victim}{how}, {self.point}"


@dataclass(frozen=True)
class Kill(Generic[P]):
    """One row.

    Attributes:
        action: A key of the actions of the matrix's test.
        deaths: One after the other, while the action is resumed or done again.
        is_fast: Whether `make test` has it.
    """

    action: str
    deaths: tuple[Death[P], ...]
    is_fast: bool = False

    @property
    def victims(self) -> set[str]:
        return {death.victim for death in self.deaths}

    def __str__(self) -> str:
        return ", ".join([self.action, *map(str, self.deaths)])


def cross(action: str, victims: Collection[str], points: Collection[P], fast: P | None = None) -> Iterator[Kill[P]]:
    """A row for each victim at each point, killed once; `make test` has those at the point `fast`."""
    for victim in victims:
        for point in points:
            yield Kill(action, (Death(victim, point),), is_fast=point == fast)


def as_parameters(kills: Iterable[Kill[Any]]) -> list[Any]:
    """The rows as parameters of a test."""
    return [pytest.param(kill, id=str(kill), marks=[] if kill.is_fast else pytest.mark.slow) for kill in kills]
