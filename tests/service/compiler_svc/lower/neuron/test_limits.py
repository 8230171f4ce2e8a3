"""The interpreter with Neuron's packages ends with its lowering process, and leaves nothing half-written."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from compiler_svc.lower.errors import LoweringTimedOut
from compiler_svc.lower.job import LoweringJob, read_outcome
from compiler_svc.lower.neuron.request import read_answer
from compiler_svc.lower.pool import LoweringPool, make_forkserver
from execution.forkserver.client import ForkserverClient
from targets.neuron import NEURON_PYTHON
from tests.checkpoints.tiny_models import GEOMETRIES, write_tiny_model
from tests.hang_guard import HANG_S
from tests.neuron.standin import make_interpreter
from tests.service.compiler_svc.lower.neuron.test_model_builder import stage

#: Seconds until the interpreter has surely called the compiler, on hosts with other work.
START_S = 240.0


@pytest.fixture
def waiting(tmp_path: Path) -> Path:
    """Appears when the compiler has been called, which does not return then; holds the id of its process."""
    return tmp_path / "waiting"


@pytest.fixture
def job(tmp_path: Path, waiting: Path, monkeypatch: pytest.MonkeyPatch) -> LoweringJob:
    (orders := tmp_path / "orders.json").write_text(json.dumps({"wait": str(waiting)}))
    monkeypatch.setenv("KILN_TEST_NEURONX_CC", str(orders))
    monkeypatch.setenv(NEURON_PYTHON.variable, str(make_interpreter(tmp_path)))
    return stage(write_tiny_model(tmp_path / "tiny", GEOMETRIES["gqa-llama3-tied"]), tmp_path / "job")


@pytest.fixture
def lowerings(job: LoweringJob) -> Iterator[ForkserverClient]:
    """A forkserver that has the job's environment."""
    with closing(make_forkserver()) as forkserver:
        yield forkserver


async def wait_for(path: Path) -> psutil.Process:
    async with asyncio.timeout(START_S):
        while not os.access(path, os.R_OK):  # noqa: ASYNC110 - files announce no change
            await asyncio.sleep(0.02)
    return psutil.Process(int(await asyncio.to_thread(path.read_text)))


def check_nothing_is_left(job: LoweringJob, interpreter: psutil.Process) -> None:
    _, alive = psutil.wait_procs([interpreter], timeout=HANG_S)
    assert not alive
    assert read_answer(job.directory) is None
    assert read_outcome(job) is None
    assert list(job.directory.rglob("*.neff")) == []


async def test_cancelling(job: LoweringJob, waiting: Path, lowerings: ForkserverClient) -> None:
    pool = LoweringPool(lowerings, num_processes=1, timeout_s=START_S)
    task = asyncio.create_task(pool.lower([job]))
    interpreter = await wait_for(waiting)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    check_nothing_is_left(job, interpreter)


@pytest.mark.slow
async def test_the_time_limit(job: LoweringJob, waiting: Path, lowerings: ForkserverClient) -> None:
    pool = LoweringPool(lowerings, num_processes=1, timeout_s=60)
    task = asyncio.create_task(pool.lower([job]))
    interpreter = await wait_for(waiting)
    with pytest.raises(LoweringTimedOut, match=f"lowering of {job.tag} took longer than 60 s"):
        await task
    check_nothing_is_left(job, interpreter)
