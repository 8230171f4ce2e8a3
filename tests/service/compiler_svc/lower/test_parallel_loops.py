"""Loops that are too short for several threads."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bundle.manifest import Target
from compiler_svc.lower.job import LoweringOptions
from compiler_svc.lower.parallel_loops import MIN_PARALLEL_ELEMENTS
from compiler_svc.lower.pool import LoweringPool
from compiler_svc.lower.program import stage_job
from execution.forkserver.client import ForkserverClient
from tests.lowering_cache import LOWERING_CACHE


class Loops(nn.Module):
    """A loop of each size, and a sum behind it."""

    def forward(self, short: Tensor, long: Tensor) -> tuple[Tensor, Tensor]:
        return short.exp() / short.exp().sum(-1, keepdim=True), long.exp() + 1


@pytest.mark.slow
@pytest.mark.toolchain
def test_threads_meet_for_long_loops_only(tmp_path: Path, lowerings: ForkserverClient) -> None:
    inputs = torch.ones(1, 768), torch.ones(1, MIN_PARALLEL_ELEMENTS)
    job = stage_job(
        torch.export.export(Loops(), inputs),
        tag="loops",
        num_state=0,
        options=LoweringOptions(optimization_level=1, target=Target(kind="cpu", isa="x86-64-v3")),
        directory=tmp_path / "loops",
        cache_dir=LOWERING_CACHE,
    )
    asyncio.run(LoweringPool(lowerings, num_processes=1, timeout_s=240).lower([job]))
    code = (job.directory / "executable.kernel.cpp").read_text()
    assert code.count("#pragma omp for") == 1, "the short loop and its sum are of one thread"
