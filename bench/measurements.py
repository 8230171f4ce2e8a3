"""Figures of one run, by name and by the round in which they were taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bench.worker import median


@dataclass(frozen=True, slots=True)
class Reads:
    """What a decode step reads.

    Attributes:
        weights_bytes: All weights but other tokens' embeddings.
        position_bytes: Keys and values of one position of a stream, of all layers.
    """

    weights_bytes: float
    position_bytes: float


@dataclass
class Measurements:
    """The figures that a run has measured.

    Attributes:
        samples: By name and round, one figure: seconds, or for limits a rate. A round may lack it: not all measure
            everything, and what fails gives no figure.
        pools: By name, figures of all rounds together, such as the times between two tokens.
        notes: Facts that a reader needs, such as how a peer ran.
        profiles: Where the time of steps goes: by step, shares by what was done.
        reads: What steps of Kiln's own bundles read, by engine.
    """

    samples: dict[str, dict[int, float]] = field(default_factory=dict)
    pools: dict[str, list[float]] = field(default_factory=dict)
    once: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    profiles: dict[str, dict[str, float]] = field(default_factory=dict)
    reads: dict[str, Reads] = field(default_factory=dict)
    _round: int = 0

    def begin_round(self) -> None:
        """Figures that are added from now on are of the next round."""
        self._round += 1

    def add(self, name: str, figure: float) -> None:
        """Adds this round's figure."""
        self.samples.setdefault(name, {})[self._round] = figure

    def add_steps(self, name: str, steps: Mapping[str, Any]) -> None:
        """Adds one round of `bench.worker.time_steps`: the median as NAME, the processor time as NAME.cpu."""
        self.add(name, median(steps["wall_s"]))
        self.add(f"{name}.cpu", steps["cpu_s"])

    def pool(self, name: str, figures: Iterable[float]) -> None:
        """Adds figures whose distribution counts, not their median by rounds."""
        self.pools.setdefault(name, []).extend(figures)

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Notes the error that ends the block as the reason why `what` is missing, and goes on behind the block."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - one row that fails, whatever the reason, ends no run
            self.failures[what] = f"{type(error).__name__}: {error}"
            print(f"FAILED {what}: {self.failures[what]}", flush=True)

    def percentile(self, name: str, percent: float) -> float:
        """The least of the pooled figures that so many percent of them do not exceed."""
        return find_percentile(self.pools[name], percent)

    def has(self, *names: str) -> bool:
        """Whether any round has measured all of these figures."""
        return bool(self._common_rounds(names))

    def this_round(self, name: str) -> float:
        """The figure of this round."""
        if self._round not in self.samples.get(name, {}):
            raise LookupError(f"this round has no {name}")
        return self.samples[name][self._round]

    def typical(self, name: str) -> float:
        """The median over the rounds."""
        return median([*self.samples[name].values()])

    def range(self, name: str) -> tuple[float, float]:
        """The least and the greatest figure of a round."""
        return min(self.samples[name].values()), max(self.samples[name].values())

    def relate(self, combine: Callable[..., float], *names: str) -> float:
        """The median, over the rounds that have them all, of a figure combined from several of the same round."""
        rounds = self._common_rounds(names)
        return median([combine(*(self.samples[name][number] for name in names)) for number in rounds])

    def _common_rounds(self, names: Sequence[str]) -> list[int]:
        first, *others = (self.samples.get(name, {}) for name in names)
        return [number for number in first if all(number in other for other in others)]


def find_percentile(figures: Sequence[float], percent: float) -> float:
    """The least of some figures that so many percent of them do not exceed."""
    ordered = sorted(figures)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
