"""Loops of generated code that end early, at a bound that is known when a step runs."""

from __future__ import annotations

from copy import copy
from typing import Final, NamedTuple, Self

from torch._inductor.codegen.cpp import LoopLevel
from torch._inductor.codegen.cpp_utils import cexpr_index

#: The variable in a library: tokens of the step up to the last live one, numbered through all rows.
COUNT: Final = "kiln_live_tokens"
#: The variable with the step's `sampling_params`, if the library has such an input.
PARAMS: Final = "kiln_sampling_params"
#: Declares both, for code that uses them.
DECLARATION: Final = f"extern int64_t {COUNT}; extern const float* {PARAMS};"


class StepShape(NamedTuple):
    """The shape of a step: its rows, and the tokens of each row."""

    rows: int
    tokens: int


class LimitedLoop(LoopLevel):  # type: ignore[misc]
    """A loop that ends early, at the index that the C++ expression `bound` gives, no larger than its size. `bound` may
    use `COUNT`, `PARAMS` and the variables of loops around this one.
    """

    bound: str

    @classmethod
    def of(cls, loop: LoopLevel, bound: str) -> Self:
        """Makes a copy of a loop that ends at a bound."""
        limited: Self = copy(loop)
        limited.__class__ = cls
        limited.bound = bound
        return limited

    def without_bound(self) -> LoopLevel:
        """Makes a copy that runs to its end."""
        whole = copy(self)
        whole.__class__ = LoopLevel
        return whole

    def lines(self) -> list[str] | None:
        """Writes the head of the loop."""
        lines: list[str] | None = super().lines()
        if lines is None:
            return None
        whole = f"{self.var}<{cexpr_index(self.size)};"
        assert whole in lines[-1], lines
        lines[-1] = lines[-1].replace(whole, f"{self.var}<({self.bound});")
        return [DECLARATION, *lines]
