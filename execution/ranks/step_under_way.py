"""A running step of a group of ranks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from bundle.errors import KilnError
from execution.ranks.control import Stepped
from execution.step import Step, StepResult


@dataclass(eq=False, slots=True)
class StepUnderWay:
    """A running step and the ranks' answers so far, errors included."""

    step: Step
    memory_set: int
    result: asyncio.Future[StepResult]
    outcomes: list[Stepped | KilnError] = field(default_factory=list)

    def settle(self, outcome: StepResult | Exception) -> None:
        """Gives the caller the result or the error, unless the caller has been cancelled."""
        if self.result.done():
            return
        if isinstance(outcome, Exception):
            self.result.set_exception(outcome)
            # Marks the error as retrieved, because the caller may have been cancelled.
            self.result.exception()
        else:
            self.result.set_result(outcome)
