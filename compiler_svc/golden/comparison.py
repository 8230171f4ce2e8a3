"""Compares one row of an executable's outputs with the reference's logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from bundle.abi.inputs import INPUTS, read_sampling_params
from bundle.abi.outputs import INVALID_ROW
from bundle.abi.tensor import DType
from bundle.manifest import Sampling, TensorSpec
from compiler_svc.golden.errors import GoldenMismatch
from compiler_svc.golden.reference import Reading
from execution.dtypes import TORCH_DTYPES
from execution.noise import make_noise
from execution.sampling import is_greedy, sample

#: Largest deviation of a logit, as a share of the largest reference logit. Tokens whose reference logits differ by at
#: most twice as much are tied and may change places. In low precision, reference and executable round alike but at
#: different points: logits of small random models of 8 layers differ by up to 6e-2 in bfloat16 and 6e-3 in float16.
#: Reference and executable keep the same of a key or value in a byte, unless it lies so near the middle between two
#: that the last digits of the computation decide: then they keep neighbours, of which one may be an eighth larger.
TOLERANCES: Final[Mapping[DType, float]] = {
    "float32": 1e-4,
    "float16": 2e-2,
    "bfloat16": 1e-1,
    "float8_e4m3fn": 2e-2,
    "int8": 2e-2,
}
#: What is added where layers quantize what they multiply, by the dtype of items: one that is a step away moves all that
#: is computed of it. In float32 few are; in bfloat16 many, and logits of a small model moved by up to 4e-2 and 1e-1.
ACTIVATION_TOLERANCES: Final[Mapping[DType, float]] = {"int8": 5e-2, "float8_e4m3fn": 1e-1}
#: What is added where code for cpu multiplies by matrices of these items, with activations of 16 bits, whose unit is
#: 2^-15 to 2^-14 of a row's largest magnitude. Logits of random models of 2 and 12 layers moved by 2e-4, and by 1e-3
#: where two activations were 20 times the others.
WEIGHT_TOLERANCES: Final[Mapping[DType, float]] = {"int8": 2e-3, "uint8": 2e-3}


@dataclass(frozen=True)
class GoldenComparison:
    """The result of comparing one executable with the reference.

    `max_deviation` is the largest of a logit, as a share of the largest reference logit; None if the executable returns
    none, not even internally. `num_ties` counts tokens that differ from the reference's, but are tied with them.
    """

    tag: str
    num_steps: int = 0
    max_deviation: float | None = None
    num_ties: int = 0

    def with_step(
        self, outputs: Mapping[str, Tensor], reference: Tensor, *, position: int, tolerance: float, sampling: Sampling
    ) -> GoldenComparison:
        """Adds one step: the row's outputs, `logits` f32 [vocab_size] and `tokens` int32 [], and the reference, f32
        [vocab_size].
        """
        scale = _scale_of(reference)
        max_deviation, num_ties = self.max_deviation, self.num_ties
        if "logits" in outputs:
            deviation = float((outputs["logits"] - reference).abs().max()) / scale
            if not deviation <= tolerance:
                detail = f"logits deviate by {deviation:.2e} of the largest, more than {tolerance:.0e}"
                raise GoldenMismatch(self.tag, position, detail)
            max_deviation = max(deviation, max_deviation or 0.0)
        if "tokens" in outputs:
            token = int(outputs["tokens"])
            if token == INVALID_ROW:
                # The reference of a checkpoint with NaN has none either, and would agree.
                raise GoldenMismatch(self.tag, position, "logits are NaN or infinite")
            num_ties += self._is_other(token, reference, sampling, tie=2 * tolerance, position=position)
            if "logits" in outputs:
                # The token was picked from these same logits, so only the arithmetic of picking may differ.
                self._is_other(token, outputs["logits"], sampling, tie=TOLERANCES["float32"], position=position)
        return replace(self, num_steps=self.num_steps + 1, max_deviation=max_deviation, num_ties=num_ties)

    def with_prompt(
        self, said: Mapping[str, Tensor], reading: Reading, next_ids: Sequence[int], *, start: int, tolerance: float
    ) -> GoldenComparison:
        """Adds what a step says of a prompt from position `start` on, beside what the reference makes of the same
        tokens. The last token may have no next one.
        """
        count, num_next = len(reading.hidden), len(next_ids)
        expected: dict[str, tuple[Tensor, Tensor]] = {}
        if "last_hidden" in said:
            expected["last_hidden"] = said["last_hidden"], reading.hidden[-1]
            expected["hidden_sum"] = said["hidden_sum"] / count, reading.hidden.mean(dim=0)
        largest = {name: _scale_of(pair[1]) for name, pair in expected.items()}
        if "prompt_logprobs" in said:
            logprobs = reading.logits.log_softmax(dim=-1)
            told = said["prompt_logprobs"][:num_next]
            expected["prompt_logprobs"] = told, logprobs.gather(-1, torch.tensor(next_ids)[:, None])[:, 0]
            top, ids = said["prompt_top_logprobs"][:count], said["prompt_top_ids"][:count].long()
            expected["prompt_top_logprobs"] = top, logprobs.topk(top.shape[-1], dim=-1).values
            expected["prompt_top_ids"] = top, logprobs.gather(-1, ids.clamp(0, logprobs.shape[-1] - 1))
        # A log probability moves by as much as a logit does, and as the sum of all does.
        scale = 2 * _scale_of(reading.logits)
        for name, (told, values) in expected.items():
            deviation = float((told - values).abs().max()) / largest.get(name, scale) if values.numel() else 0.0
            if not deviation <= tolerance:
                detail = f"{name} deviates by {deviation:.2e}, more than {tolerance:.0e}"
                raise GoldenMismatch(self.tag, start + count - 1, detail)
        return self

    def _is_other(self, token: int, logits: Tensor, sampling: Sampling, *, tie: float, position: int) -> bool:
        """Whether a token differs from the one that the logits select. Raises unless they are tied."""
        expected, values = _pick_token(logits, sampling)
        gap = float("inf")
        if 0 <= token < len(logits):
            gap = float(values[expected] - values[token]) / _scale_of(logits)
        if token != expected and not abs(gap) < tie:
            detail = f"token {token} in place of {expected}, whose logit is {gap:.2e} of the largest away"
            raise GoldenMismatch(self.tag, position, detail)
        return token != expected


def _scale_of(logits: Tensor) -> float:
    """The largest logit, which deviations are shares of; 1 where all are 0, so that they count as they are."""
    return float(logits.abs().max()) or 1.0


def _pick_token(reference: Tensor, sampling: Sampling) -> tuple[int, Tensor]:
    """The token that the executable should pick, and what of each token decided: its logit with its noise, f32
    [vocab_size]. Golden steps sample as idle rows do.
    """
    params = INPUTS["sampling_params"].idle if sampling.dynamic else read_sampling_params(sampling)
    spec, row = TensorSpec.of(INPUTS[sampling.chance], {"R": 1}), torch.tensor([params])
    chance = torch.tensor([INPUTS[spec.name].idle_values(spec.shape, {})], dtype=TORCH_DTYPES[spec.dtype])
    values = reference
    if sampling.chance == "noise_keys" and not is_greedy(row):
        values = reference + row[0, 2] * make_noise(torch.arange(len(reference), dtype=torch.int32), chance)[0]
    return int(sample(reference[None], row, chance, sampling.global_topk)), values
