"""Weights of one element, whose values Inductor would take from the uninitialized example: a rank's number is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from execution.forkserver.client import ForkserverClient
from tests.service.compiler_svc.lower.libraries import lower_module, open_library

pytestmark = [pytest.mark.slow, pytest.mark.toolchain]


class Offset(nn.Module):
    """Ids of a rank's part of a vocabulary, scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = nn.Parameter(torch.full((1,), 77, dtype=torch.int32), requires_grad=False)
        self.scale = nn.Parameter(torch.full((1,), 0.5), requires_grad=False)

    def forward(self, places: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        ids = torch.where(places < 3, places + self.rank * 10, -1)
        return ids * (self.scale * 2), state + 1


def test_they_stay_constants_of_the_library(tmp_path: Path, lowerings: ForkserverClient) -> None:
    places, state = torch.arange(4, dtype=torch.int32), torch.zeros(2)
    lowered = lower_module(lowerings, tmp_path, Offset(), (places, state), num_state=1)
    assert set(lowered.constants) == {"rank", "scale"}
    for rank in (0, 3):
        weights = {"rank": torch.tensor([rank], dtype=torch.int32), "scale": torch.tensor([1.5])}
        with open_library(lowered, weights) as library:
            (ids,) = library.run([places, state])
        assert ids.tolist() == [30 * rank, 30 * rank + 3, 30 * rank + 6, -3]
