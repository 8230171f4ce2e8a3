"""Loops that are too short for several threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from compiler_svc.lower.inductor import MIN_PARALLEL_ELEMENTS
from execution.forkserver.client import ForkserverClient
from tests.service.compiler_svc.lower.libraries import lower_module, read_code


class Loops(nn.Module):
    """A loop of each size, and a sum behind it."""

    def forward(self, short: Tensor, long: Tensor) -> tuple[Tensor, Tensor]:
        return short.exp() / short.exp().sum(-1, keepdim=True), long.exp() + 1


@pytest.mark.slow
@pytest.mark.toolchain
def test_threads_meet_for_long_loops_only(tmp_path: Path, lowerings: ForkserverClient) -> None:
    inputs = torch.ones(1, 768), torch.ones(1, MIN_PARALLEL_ELEMENTS)
    code = read_code(lower_module(lowerings, tmp_path, Loops(), inputs, num_state=0), "kernel")
    assert code.count("#pragma omp for") == 1, "the short loop and its sum are of one thread"
