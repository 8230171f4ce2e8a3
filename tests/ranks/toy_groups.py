"""Groups of rank processes that run toy bundles, and steps for them."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
from torch import Tensor

from bundle.manifest import Manifest
from execution.dtypes import dtype_name
from execution.ranks.forkservers import RankForkservers
from execution.ranks.group import RankGroup
from execution.ranks.watchdog import MIN_STEP_TIMEOUT_S
from execution.step import ITEM_FORMATS, Step, StepInputs
from tests.contract.executors.executor_suite import (
    CTE,
    TKG,
    prompt_inputs,
    token_inputs,
)
from tests.processes import descendants, name_of
from tests.ranks.noise import draw_keys
from tests.ranks.toy import SLOTS

GREEDY = (1.0, 1.0, 1.0)


def step(
    tag: str,
    inputs: dict[str, Tensor],
    top_logprobs: int | None = None,
    *,
    params: tuple[float, ...] = GREEDY,
    seed: int = 0,
) -> Step:
    rows = len(inputs["seq_ids"])
    values: StepInputs = {
        name: array(ITEM_FORMATS[dtype_name(tensor.dtype)], tensor.flatten().tolist())
        for name, tensor in inputs.items()
    }
    values |= {
        "sampling_params": array("f", params * rows),
        "noise_keys": array("i", draw_keys(rows, seed).flatten().tolist()),
    }
    return Step(tag, values, top_logprobs)


PREFILL = step(CTE, prompt_inputs([5, 6, 7], 0))
DECODE = step(TKG, token_inputs([8, 9], [3, 0], [0, SLOTS]))


async def start(
    manifest: Manifest,
    blobs: dict[str, Path],
    forkservers: RankForkservers | None,
    log: list[str] | None = None,
    *,
    num_threads: int = 1,
    min_step_timeout_s: float = MIN_STEP_TIMEOUT_S,
) -> RankGroup:
    sink = None if log is None else (lambda rank, line: log.append(f"{rank} {line}"))
    open_forkserver = None if forkservers is None else forkservers.open
    return await RankGroup.start(
        manifest,
        blobs,
        num_threads=num_threads,
        log_sink=sink,
        open_forkserver=open_forkserver,
        min_step_timeout_s=min_step_timeout_s,
    )


def rank_processes() -> set[psutil.Process]:
    """This process's ranks, by the name that they give themselves."""
    return {one for one in descendants() if name_of(one).startswith("kiln-rank")}


@asynccontextmanager
async def loaded_group(
    manifest: Manifest,
    blobs: dict[str, Path],
    forkservers: RankForkservers | None,
    *,
    min_step_timeout_s: float = MIN_STEP_TIMEOUT_S,
) -> AsyncIterator[tuple[RankGroup, list[psutil.Process]]]:
    """A loaded group and its processes in rank order, which are gone afterwards."""
    before = rank_processes()
    group = await start(manifest, blobs, forkservers, [], min_step_timeout_s=min_step_timeout_s)
    processes = sorted(rank_processes() - before, key=lambda process: process.pid)
    try:
        await group.load()
        yield group, processes
    finally:
        await group.close()
        assert not any(process.is_running() for process in processes)


@asynccontextmanager
async def loaded(
    manifest: Manifest, blobs: dict[str, Path], forkservers: RankForkservers | None
) -> AsyncIterator[tuple[RankGroup, psutil.Process]]:
    """A loaded group of one rank, and its process, which is gone afterwards."""
    async with loaded_group(manifest, blobs, forkservers) as (group, (process,)):
        yield group, process
