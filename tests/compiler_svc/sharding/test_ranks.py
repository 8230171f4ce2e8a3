"""Ranks together compute what one rank computes: shards, rank-local modules and KV heads fit each other.

The collectives are stand-ins that meet in this process; graphs call them by the operators' names.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compiler_svc.stepping import Stepper
from tests.compiler_svc.tiny_llama import GEOMETRIES, TOLERANCE, deviation, draw_tokens, write_tiny_llama


class Meeting:
    """Ranks, one thread each, that exchange tensors."""

    def __init__(self, tp_degree: int) -> None:
        self.barrier = threading.Barrier(tp_degree, timeout=30)
        self.tensors: list[torch.Tensor] = [torch.empty(0)] * tp_degree
        self.this = threading.local()

    def exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.tensors[self.this.rank] = tensor
        self.barrier.wait()
        everybody = list(self.tensors)
        self.barrier.wait()
        return everybody


@pytest.fixture
def meeting(request: pytest.FixtureRequest) -> Iterator[Meeting]:
    meeting = Meeting(request.param)
    library = torch.library.Library("kiln", "FRAGMENT")
    library.define("all_reduce(Tensor partial) -> Tensor")
    library.define("all_gather(Tensor part) -> Tensor")
    library.impl("all_reduce", lambda partial: sum(meeting.exchange(partial)), "CPU")
    library.impl("all_gather", lambda part: torch.cat(meeting.exchange(part), dim=-1), "CPU")
    yield meeting
    library._destroy()


def run_ranks(meeting: Meeting, work: Callable[[int], Any]) -> list[Any]:
    def run(rank: int) -> Any:
        meeting.this.rank = rank
        return work(rank)

    with ThreadPoolExecutor(len(meeting.tensors)) as pool:
        return list(pool.map(run, range(len(meeting.tensors))))


@pytest.mark.parametrize("meeting", [2, 4], indirect=True)
@pytest.mark.parametrize("geometry", ["gqa-llama3-tied", "mha-bias-untied"])
def test_ranks_compute_what_one_computes(meeting: Meeting, geometry: str, tmp_path: Path) -> None:
    tiny = write_tiny_llama(tmp_path, GEOMETRIES[geometry] | {"vocab_size": 212})
    tp_degree = len(meeting.tensors)
    tokens = draw_tokens(16)

    def generate(rank: int) -> torch.Tensor:
        stepper = Stepper(
            tiny.spec(tp_degree=tp_degree),
            tiny.plan(tp_degree=tp_degree),
            tiny.checkpoint,
            context_buckets=(16,),
            token_buckets=(32,),
            rank=rank,
        )
        logits = [stepper.prefill({1: tokens[:9]})["logits"][0]]
        for position in range(9, len(tokens)):
            logits += [stepper.decode({1: (tokens[position], position)})["logits"][1]]
        return torch.stack(logits)

    expected = tiny.step_logits(tokens, 9)
    for logits in run_ranks(meeting, generate):
        assert deviation(logits, expected) < TOLERANCE
