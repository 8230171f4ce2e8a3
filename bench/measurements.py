"""Figures of one run, by name, in the order in which they were taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.worker import median


@dataclass
class Measurements:
    """The figures that a run has measured.

    Attributes:
        samples: By name, one figure for each round: seconds, or for limits a rate.
        pools: By name, figures of all rounds together, such as the times between two tokens.
        once: Figures taken once.
        notes: Facts that a reader needs, such as how a peer ran.
        skipped: Peers that were not measured, and why.
        profiles: Where the time of steps goes: by step, shares by what was done.
    """

    samples: dict[str, list[float]] = field(default_factory=dict)
    pools: dict[str, list[float]] = field(default_factory=dict)
    once: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    profiles: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, name: str, figure: float) -> None:
        """Adds one round's figure."""
        self.samples.setdefault(name, []).append(figure)

    def add_steps(self, name: str, steps: Mapping[str, Any]) -> None:
        """Adds one round of `bench.worker.time_steps`: the median as NAME, the processor time as NAME.cpu."""
        self.add(name, median(steps["wall_s"]))
        self.add(f"{name}.cpu", steps["cpu_s"])

    def pool(self, name: str, figures: Iterable[float]) -> None:
        """Adds figures whose distribution counts, not their median by rounds."""
        self.pools.setdefault(name, []).extend(figures)

    def percentile(self, name: str, percent: float) -> float:
        """The least of the pooled figures that so many percent of them do not exceed."""
        ordered = sorted(self.pools[name])
        return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]

    def has(self, name: str) -> bool:
        """Whether any round has measured the figure."""
        return bool(self.samples.get(name))

    def typical(self, name: str) -> float:
        """The median over the rounds."""
        return median(self.samples[name])

    def range(self, name: str) -> tuple[float, float]:
        """The least and the greatest figure of a round."""
        return min(self.samples[name]), max(self.samples[name])

    def relate(self, combine: Callable[..., float], *names: str) -> float:
        """The median over the rounds of a figure combined from several of the same round."""
        return median([combine(*figures) for figures in zip(*(self.samples[name] for name in names), strict=True)])
