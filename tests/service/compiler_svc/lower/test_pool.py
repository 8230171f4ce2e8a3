"""The pool with real child processes; no test here compiles to the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from bundle.errors import ResourcesShort
from compiler_svc.lower import common_objects, process
from compiler_svc.lower.errors import (
    LoweringFailed,
    LoweringMemoryExceeded,
    LoweringTimedOut,
    ProgramUnsupported,
)
from compiler_svc.lower.job import LoweringJob
from compiler_svc.lower.pool import LOWERING_ENVIRONMENT, LoweringPool, LoweringProgress, make_forkserver
from execution.forkserver.client import Forkserver, ForkserverClient
from execution.forkserver.protocol import Call
from targets.errors import ToolchainMissing
from tests.hang_guard import HANG_S
from tests.processes import lives, name_of, note_others, own_children
from tests.running_time import running_time
from tests.service.compiler_svc.lower.conftest import StageToy
from tests.shortages import few_descriptors

pytestmark = pytest.mark.toolchain

CHILD = "kiln-lowering"
FORKSERVER = "kiln-lowerings"


@pytest.fixture(scope="module", autouse=True)
def _others() -> None:
    note_others()


def preload_nothing_prebuilt() -> None:
    """Preloads what lowerings need, for processes that find none of the headers that set-up has compiled."""
    common_objects.PREBUILT = Path("/nonexistent")
    process.preload()


@pytest.fixture(scope="module")
def lowerings() -> Iterator[Forkserver]:
    """A forkserver whose lowerings compile headers whatever processor the host has."""
    preload = Call(f"{__name__}:preload_nothing_prebuilt")
    with closing(Forkserver(FORKSERVER, preload, kind="build", environment=LOWERING_ENVIRONMENT)) as forkserver:
        yield forkserver


@pytest.fixture
def pool(lowerings: ForkserverClient) -> LoweringPool:
    return LoweringPool(lowerings, num_processes=2, timeout_s=120)


async def wait_for(name: str) -> list[psutil.Process]:
    """Waits for a process of this name; returns the lowering's processes, without their forkserver."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = [one for one in own_children() if lives(one)]
        if any(name_of(one) == name for one in found):
            return [one for one in found if name_of(one) != FORKSERVER]
        await asyncio.sleep(0.02)
    raise TimeoutError(name)


def spoil(job: LoweringJob) -> LoweringJob:
    job.program_path.write_bytes(b"no program")
    return job


@pytest.fixture(autouse=True)
def _nothing_is_left() -> None:
    yield
    assert not [one for one in own_children() if lives(one) and name_of(one) in (CHILD, "cc1plus")]


async def test_a_failing_child_is_named_and_the_end_of_its_output_is_logged(
    stage_toy: StageToy, lowerings: ForkserverClient, capsys: pytest.CaptureFixture[str]
) -> None:
    far_limit_bytes = 1 << 40
    pool = LoweringPool(lowerings, num_processes=2, timeout_s=120, memory_limit_bytes=far_limit_bytes)
    with pytest.raises(LoweringFailed) as caught:
        await pool.lower([spoil(stage_toy("bad", 1))])
    how = "BadZipFile: File is not a zip file"
    assert str(caught.value) == f"lowering of bad ended with {how}; the compiler's log says more"
    assert caught.value.metadata == {"tag": "bad", "how": how}, "clients see it, and output names files of the host"
    assert "Traceback (most recent call last):" in capsys.readouterr().out


async def test_one_failure_ends_the_others(stage_toy: StageToy, pool: LoweringPool) -> None:
    progress: list[LoweringProgress] = []
    with pytest.raises(LoweringFailed, match="lowering of bad"):
        await pool.lower([stage_toy("good", 1), spoil(stage_toy("bad", 1))], progress.append)
    assert progress == []


async def test_timeout(stage_toy: StageToy, lowerings: ForkserverClient) -> None:
    pool = LoweringPool(lowerings, num_processes=1, timeout_s=0.3)
    with (
        running_time() as taken,
        pytest.raises(LoweringTimedOut, match=r"lowering of slow took longer than 0\.3 s"),
    ):
        await pool.lower([stage_toy("slow", 1)])
    assert taken.s < 5


async def test_cancelling_ends_the_compiler_too_and_leaves_no_half_of_a_header(
    stage_toy: StageToy, pool: LoweringPool
) -> None:
    job = stage_toy("cancelled", 1)
    task = asyncio.create_task(pool.lower([job]))
    # A precompiled header. Later jobs that find it in the cache take it to be whole.
    async with asyncio.timeout(120):
        while not list(job.directory.glob("*.gch")):  # noqa: ASYNC110 - files announce no change
            await asyncio.sleep(0.02)
    processes = await wait_for("cc1plus")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    _, alive = psutil.wait_procs(processes, timeout=HANG_S)
    assert not alive
    assert list((job.cache_dir / "headers").glob("*.gch")) == []


async def test_a_child_that_loses_its_parent_takes_the_compiler_along(stage_toy: StageToy, pool: LoweringPool) -> None:
    task = asyncio.create_task(pool.lower([stage_toy("orphan", 1)]))
    processes = await wait_for("cc1plus")
    # What the kernel sends when the parent ends.
    next(one for one in processes if name_of(one) == CHILD).terminate()
    with pytest.raises(LoweringFailed, match="ended with SIGKILL"):
        await task
    _, alive = psutil.wait_procs(processes, timeout=HANG_S)
    assert not alive


@pytest.mark.parametrize("limit_bytes", [20_000_000, 400_000_000])
async def test_memory_limit(stage_toy: StageToy, lowerings: ForkserverClient, limit_bytes: int) -> None:
    """A process needs more than the lower limit to start. At the other, torch and the C++ compiler end in many ways."""
    pool = LoweringPool(lowerings, num_processes=1, timeout_s=120, memory_limit_bytes=limit_bytes)
    with pytest.raises(LoweringMemoryExceeded, match=rf"lowering of hungry needs more memory than the {limit_bytes} "):
        await pool.lower([stage_toy("hungry", 1)])


async def test_what_clients_get_of_errors(stage_toy: StageToy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Named errors as they are; of others class and message, but no directory and nothing that a compiler says."""
    # A forkserver inherits its parent's environment, which leads it to a backend that fails.
    (tmp_path / "sitecustomize.py").write_text(
        "import compiler_svc.lower.aoti as aoti\n"
        "from compiler_svc.lower.errors import ProgramUnsupported\n"
        "from torch._inductor.exc import CppCompileError\n"
        "def fail(job):\n"
        "    raise {\n"
        "        'odd': ProgramUnsupported('constant x', 'is odd'),\n"
        "        'missing': FileNotFoundError(2, 'No such file or directory', '/srv/of this host/tables.cpp'),\n"
        "        'quoting': RuntimeError('/srv/a.cpp:7 and (/srv/b.h) differ\\nwhich /srv/c says'),\n"
        "        'compiled': CppCompileError(['g++', '/srv/a.cpp'], '/srv/a.cpp:7: error: no semicolon'),\n"
        "        'silent': KeyError(),\n"
        "    }[job.tag]\n"
        "aoti.lower_program = fail\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with closing(make_forkserver()) as forkserver:
        pool = LoweringPool(forkserver, num_processes=1, timeout_s=120)
        with pytest.raises(ProgramUnsupported, match="the graph cannot be lowered: constant x is odd"):
            await pool.lower([stage_toy("odd", 1)])
        for tag, how in {
            "missing": "FileNotFoundError: [Errno 2] No such file or directory: 'tables.cpp'",
            "quoting": "RuntimeError: a.cpp:7 and (b.h) differ",
            "compiled": "CppCompileError: C++ compile error",
            "silent": "KeyError",
        }.items():
            with pytest.raises(LoweringFailed) as caught:
                await pool.lower([stage_toy(tag, 1)])
            assert caught.value.metadata == {"tag": tag, "how": how}


async def test_a_missing_compiler(
    stage_toy: StageToy, pool: LoweringPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = stage_toy("uncompilable", 1)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainMissing):
        await pool.lower([job])


async def test_level_0_starts_no_process(stage_toy: StageToy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    jobs = [stage_toy(tag, 0) for tag in ("a", "b", "c")]
    monkeypatch.setenv("PATH", str(tmp_path))
    progress: list[LoweringProgress] = []
    forkserver = Forkserver("none", Call("a module:that_is_not_there"))
    executables = await LoweringPool(forkserver, num_processes=2, timeout_s=1).lower(jobs, progress.append)
    assert [one.tag for one in executables] == ["a", "b", "c"]
    assert [(one.format, one.state_convention) for one in executables] == [("exported_program", "functional")] * 3
    assert [one.path for one in executables] == [job.program_path for job in jobs]
    assert [(one.tag, one.done, one.total) for one in progress] == [("a", 1, 3), ("b", 2, 3), ("c", 3, 3)]


async def test_a_lowering_without_descriptors_begins_when_there_are_some(
    stage_toy: StageToy, pool: LoweringPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bundle.host.shortage.BRIEF_DELAYS_S", (0.3,) * 100)
    job = spoil(stage_toy("bad", 1))
    with few_descriptors():
        lowering = asyncio.create_task(pool.lower([job]))
        await asyncio.sleep(0.1)
        assert not lowering.done()
    # It has begun, and its job is to blame.
    with pytest.raises(LoweringFailed, match="ended with BadZipFile"):
        await lowering
    monkeypatch.setattr("bundle.host.shortage.BRIEF_DELAYS_S", (0.3, 0.3))
    with few_descriptors(), pytest.raises(ResourcesShort, match="descriptors of this process"):
        await pool.lower([job])
    with pytest.raises(LoweringFailed, match="ended with BadZipFile"):
        await pool.lower([job])
