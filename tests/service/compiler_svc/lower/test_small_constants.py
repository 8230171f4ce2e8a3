"""Weights of one element, whose values Inductor would take from the uninitialized example: a rank's number is one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bundle.manifest import Target
from compiler_svc.lower.job import LoweringOptions
from compiler_svc.lower.pool import LoweringPool
from compiler_svc.lower.program import stage_job
from execution.executors.aoti_library import AotiLibrary
from execution.forkserver.client import ForkserverClient
from tests.lowering_cache import LOWERING_CACHE

pytestmark = pytest.mark.toolchain


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
    job = stage_job(
        torch.export.export(Offset(), (places, state)),
        tag="offset",
        num_state=1,
        options=LoweringOptions(optimization_level=1, target=Target(kind="cpu", isa="x86-64-v3")),
        directory=tmp_path / "offset",
        cache_dir=LOWERING_CACHE,
    )
    (lowered,) = asyncio.run(LoweringPool(lowerings, num_processes=1, timeout_s=240).lower([job]))
    assert set(lowered.constants) == {"rank", "scale"}
    library = AotiLibrary(lowered.path)
    for rank in (0, 3):
        weights = {"rank": torch.tensor([rank], dtype=torch.int32), "scale": torch.tensor([1.5])}
        library.bind_constants(weights)
        library.swap_constants()
        (ids,) = library.run([places, state])
        assert ids.tolist() == [30 * rank, 30 * rank + 3, 30 * rank + 6, -3]
    library.close()
