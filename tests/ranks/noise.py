"""Keys of noise, as of requests of their own seeds, and how well frequencies fit probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime_svc.engine.scheduler.plan import make_noise_keys


def draw_keys(rows: int, seed: int = 0, position: int = 0) -> Tensor:
    """Keys of rows whose seeds count up from `seed`, int32 [rows, 2]."""
    return torch.tensor([make_noise_keys(seed + row, position) for row in range(rows)], dtype=torch.int32)


def measure_fit(counts: Tensor, probabilities: Tensor) -> float:
    """How likely frequencies are to be this far from the probabilities, by the chi-squared test; 0 if what has
    probability 0 was counted.

    Takes counts of draws and probabilities, [V] each. Of what few draws are expected of, all together is one class.
    """
    expected = probabilities.double() / probabilities.double().sum() * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    is_rare = expected < 10
    classes = [torch.cat((one[~is_rare], one[is_rare].sum()[None])) for one in (counts.double(), expected)]
    observed, wanted = (one[classes[1] > 0] for one in classes)
    statistic, degrees = ((observed - wanted) ** 2 / wanted).sum(), len(wanted) - 1
    return float(torch.special.gammaincc(torch.tensor(degrees / 2).double(), statistic / 2))
