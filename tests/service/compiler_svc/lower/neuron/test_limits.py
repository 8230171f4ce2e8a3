"""The interpreter with Neuron's packages, and neuronx-cc below it, have the limits and the end of their lowering."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from bundle.errors import KilnError
from bundle.neff import read_neff
from compiler_svc.lower.errors import (
    LoweringFailed,
    LoweringMemoryExceeded,
    LoweringTimedOut,
    NeuronCompilerFailed,
    NeuronMemoryExceeded,
    NeuronTraceFailed,
)
from compiler_svc.lower.job import LoweredExecutable, LoweringJob
from compiler_svc.lower.neuron.request import read_answer
from compiler_svc.lower.pool import LoweringPool, make_forkserver
from execution.forkserver.client import ForkserverClient
from targets.neuron import NEURON_PYTHON
from tests.checkpoints.tiny_models import GEOMETRIES, TinyModel, write_tiny_model
from tests.hang_guard import HANG_S
from tests.neuron.neuronx_cc import TAKE_MEMORY, find_waiting, write_waiting_program
from tests.neuron.standin import make_interpreter
from tests.service.compiler_svc.lower.neuron.test_model_builder import stage

#: Seconds that a lowering may take, on hosts with other work.
TIMEOUT_S = 300.0
#: More than the interpreter needs, and less than there is.
LIMIT_BYTES = 8 << 30

Stage = Callable[..., LoweringJob]
Order = Callable[..., None]


class Running(NamedTuple):
    """The processes of a lowering while neuronx-cc runs, each a child of the next."""

    compiler: psutil.Process
    interpreter: psutil.Process
    lowering: psutil.Process
    forkserver: psutil.Process


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that the double of neuronx-cc obeys."""
    return tmp_path_factory.mktemp("orders") / "orders.json"


@pytest.fixture
def order(orders: Path) -> Iterator[Order]:
    """Says how the compiler's next runs end."""
    yield lambda **given: orders.write_text(json.dumps(given))
    orders.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def neuron_lowerings(orders: Path) -> Iterator[ForkserverClient]:
    """A forkserver, which has the environment of when it starts."""
    with pytest.MonkeyPatch.context() as patch, closing(make_forkserver()) as forkserver:
        patch.setenv("NEURON_TEST_NEURONX_CC", str(orders))
        patch.setenv(NEURON_PYTHON.variable, str(make_interpreter(orders.parent)))
        yield forkserver


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), GEOMETRIES["gqa-llama3-tied"])


@pytest.fixture
def stage_one(tiny: TinyModel, tmp_path: Path) -> Stage:
    return lambda name="job", **changes: stage(tiny, tmp_path / name, **changes)


@pytest.fixture
def pool(neuron_lowerings: ForkserverClient) -> LoweringPool:
    return LoweringPool(neuron_lowerings, num_processes=1, timeout_s=TIMEOUT_S, memory_limit_bytes=LIMIT_BYTES)


Lowering = asyncio.Task[tuple[LoweredExecutable, ...]]


async def start(pool: LoweringPool, job: LoweringJob, order: Order, *, leads_session: bool) -> tuple[Lowering, Running]:
    """Lowers until neuronx-cc runs, which does not end by itself."""
    waiting = job.directory.parent / "waiting"
    order(program=write_waiting_program(waiting, leads_session=leads_session))
    lowering = asyncio.create_task(pool.lower([job]))
    while not (found := find_waiting(waiting)):
        # A lowering that ended has failed, and says why.
        assert not lowering.done(), lowering.result()
        await asyncio.sleep(0.02)
    (compiler,) = found
    running = Running(compiler, *compiler.parents()[:3])
    assert [one.name() for one in running[2:]] == ["kiln-lowering", "kiln-lowerings"]
    return lowering, running


async def check_end(running: Running, pool: LoweringPool, order: Order, stage_one: Stage) -> None:
    """Checks that nothing runs, and that the next lowering makes an executable."""
    _, alive = await asyncio.to_thread(psutil.wait_procs, running[:3], HANG_S)
    assert alive == []
    order()
    (executable,) = await pool.lower([stage_one("next")])
    assert read_neff(executable.path, executable.tag).lnc == 2


#: Whether neuronx-cc starts a session of its own.
sessions = pytest.mark.parametrize("leads_session", [False, True], ids=["its session", "own session"])


@pytest.mark.slow
@sessions
async def test_cancelling(stage_one: Stage, pool: LoweringPool, order: Order, *, leads_session: bool) -> None:
    lowering, running = await start(pool, job := stage_one(), order, leads_session=leads_session)
    lowering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await lowering
    assert read_answer(job.directory) is None
    await check_end(running, pool, order, stage_one)


@pytest.mark.slow
@sessions
async def test_the_time_limit(
    stage_one: Stage, pool: LoweringPool, order: Order, monkeypatch: pytest.MonkeyPatch, *, leads_session: bool
) -> None:
    lowering, running = await start(pool, job := stage_one(), order, leads_session=leads_session)
    # Not a short limit, which would pass before neuronx-cc runs on a host with other work.
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: time.monotonic() + TIMEOUT_S)
    with pytest.raises(LoweringTimedOut, match=f"lowering of {job.tag} took longer than 300 s"):
        await lowering
    assert read_answer(job.directory) is None
    await check_end(running, pool, order, stage_one)


@pytest.mark.slow
@sessions
@pytest.mark.parametrize(
    ("victim", "kind", "message"),
    [
        ("forkserver", LoweringFailed, "ended with the process that it was forked from"),
        ("lowering", LoweringFailed, "ended with SIGKILL"),
        ("interpreter", LoweringFailed, "ended with CalledProcessError: .*SIGKILL"),
        ("compiler", NeuronCompilerFailed, "SIGKILL"),
    ],
)
async def test_a_process_that_is_killed_takes_the_others_along(
    stage_one: Stage, pool: LoweringPool, order: Order, *, victim: str, kind: type, message: str, leads_session: bool
) -> None:
    lowering, running = await start(pool, stage_one(), order, leads_session=leads_session)
    getattr(running, victim).kill()
    with pytest.raises(kind, match=message):
        await lowering
    await check_end(running, pool, order, stage_one)


class TestMemory:
    """The limit of a lowering's processes holds for the interpreter and for neuronx-cc; a core's memory is another."""

    async def test_of_neuronx_cc(self, stage_one: Stage, pool: LoweringPool, order: Order) -> None:
        order(program=TAKE_MEMORY)
        with pytest.raises(LoweringMemoryExceeded) as failed:
            await pool.lower([stage_one()])
        assert failed.value.metadata == {"tag": "token_generation_32", "limit_bytes": str(LIMIT_BYTES)}

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("module", "kind"), [("make_hungry", LoweringMemoryExceeded), ("make_unused", NeuronTraceFailed)]
    )
    async def test_of_the_tracer(self, stage_one: Stage, pool: LoweringPool, module: str, kind: type) -> None:
        with pytest.raises(kind):
            await pool.lower([stage_one(make_module=f"tests.neuron.refused_modules:{module}")])

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("log", "kind"),
        [
            ("terminate called after throwing an instance of 'std::bad_alloc'", LoweringMemoryExceeded),
            ("NCC_EOOM002: out of memory", NeuronMemoryExceeded),
            ("NCC_EVRF001: not supported; out of memory", NeuronCompilerFailed),
            ("no reason", NeuronCompilerFailed),
        ],
    )
    async def test_that_the_log_of_neuronx_cc_tells_of(
        self, stage_one: Stage, pool: LoweringPool, order: Order, log: str, kind: type
    ) -> None:
        order(error="exit code 70", log=log)
        with pytest.raises(KilnError) as failed:
            await pool.lower([stage_one()])
        assert type(failed.value) is kind
