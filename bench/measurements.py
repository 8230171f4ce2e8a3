"""Figures of one run, by name, in the order in which they were taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from bench.worker import median


@dataclass
class Measurements:
    """The figures that a run has measured.

    Attributes:
        samples: By name, one figure for each round: seconds, or for limits a rate.
        once: Figures taken once.
        notes: Facts that a reader needs, such as how a peer ran.
        skipped: Peers that were not measured, and why.
        profiles: Where the time of steps goes: by step, shares by what was done.
    """

    samples: dict[str, list[float]] = field(default_factory=dict)
    once: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    profiles: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, name: str, figure: float) -> None:
        """Adds one round's figure."""
        self.samples.setdefault(name, []).append(figure)

    def has(self, name: str) -> bool:
        """Whether any round has measured the figure."""
        return bool(self.samples.get(name))

    def typical(self, name: str) -> float:
        """The median over the rounds."""
        return median(self.samples[name])

    def relate(self, combine: Callable[..., float], *names: str) -> float:
        """The median over the rounds of a figure combined from several of the same round."""
        return median([combine(*figures) for figures in zip(*(self.samples[name] for name in names), strict=True)])


@dataclass(frozen=True)
class Goal:
    """A figure and the bound that it should meet."""

    name: str
    figure: float
    goal: float
    at_least: bool

    @property
    def is_met(self) -> bool:
        """Whether the figure meets its bound."""
        return self.figure >= self.goal if self.at_least else self.figure <= self.goal
