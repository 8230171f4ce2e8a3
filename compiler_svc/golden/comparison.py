"""Comparing one row of an executable's outputs with the reference's logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from bundle.abi.inputs import INPUTS
from bundle.manifest import DType, Sampling
from compiler_svc.golden.errors import GoldenMismatch
from execution.sampling import sample

#: Largest deviation of a logit, as a share of the largest reference logit. Twice as much is a tie: tokens whose
#: reference logits are that close may change places. In low precision reference and executable round alike but
#: apart: logits of small random models of 8 layers differ by up to 6e-2 in bfloat16 and 6e-3 in float16.
TOLERANCES: Final[Mapping[DType, float]] = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}


@dataclass(frozen=True)
class GoldenComparison:
    """How an executable did.

    Attributes:
        num_steps: Steps compared.
        max_deviation: Largest deviation of a logit as a share of the largest reference logit; None if the
            executable returns none.
        num_ties: Tokens that differ from the reference's while the reference is undecided.
    """

    tag: str
    num_steps: int = 0
    max_deviation: float | None = None
    num_ties: int = 0

    def with_step(
        self, outputs: Mapping[str, Tensor], reference: Tensor, *, position: int, tolerance: float, sampling: Sampling
    ) -> GoldenComparison:
        """Adds one step.

        Args:
            outputs: The executable's outputs for the row: `logits` f32 [vocab_size], `tokens` int32 [].
            reference: f32 [vocab_size].
            position: Of the token that the outputs follow.

        Raises:
            GoldenMismatch: Logits deviate by more than `tolerance`, or the token is another and no tie, or is not the
                one that the executable's own logits ask for.
        """
        scale = float(reference.abs().max())
        max_deviation, num_ties = self.max_deviation, self.num_ties
        if "logits" in outputs:
            deviation = float((outputs["logits"] - reference).abs().max()) / scale
            if not deviation <= tolerance:
                detail = f"logits deviate by {deviation:.2e} of the largest, more than {tolerance:.0e}"
                raise GoldenMismatch(self.tag, position, detail)
            max_deviation = max(deviation, max_deviation or 0.0)
        if "tokens" in outputs:
            token = int(outputs["tokens"])
            num_ties += self._is_other(token, reference, sampling, tie=2 * tolerance, position=position)
            if "logits" in outputs:
                # The token was picked from these very logits: only the arithmetic of picking leaves room.
                self._is_other(token, outputs["logits"], sampling, tie=TOLERANCES["float32"], position=position)
        return replace(self, num_steps=self.num_steps + 1, max_deviation=max_deviation, num_ties=num_ties)

    def _is_other(self, token: int, logits: Tensor, sampling: Sampling, *, tie: float, position: int) -> bool:
        """Whether a token is another than logits ask for, which only a tie may be."""
        expected = _pick_token(logits, sampling)
        gap = float("inf")
        if 0 <= token < len(logits):
            gap = float(logits[expected] - logits[token]) / float(logits.abs().max())
        if token != expected and not abs(gap) < tie:
            detail = f"token {token} in place of {expected}, whose logit is {gap:.2e} of the largest away"
            raise GoldenMismatch(self.tag, position, detail)
        return token != expected


def _pick_token(reference: Tensor, sampling: Sampling) -> int:
    """The token that the executable should pick: golden steps sample as idle rows do."""
    baked = (float(sampling.top_k), sampling.top_p, sampling.temperature)
    params = torch.tensor([INPUTS["sampling_params"].idle if sampling.dynamic else baked])
    return int(sample(reference[None], params, torch.tensor([INPUTS["rand"].idle]), sampling.global_topk))
