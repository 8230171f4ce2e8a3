"""Real rank processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import pytest
import pytest_asyncio
import torch

from bundle.manifest import Target
from execution.errors import (
    ExecutableInvalid,
    ExecutableUnknown,
    RankDied,
    SlotUnknown,
    StepInvalid,
)
from execution.ranks.forkservers import RankForkservers
from execution.ranks.group import RankGroup
from execution.ranks.handle import LoadProgress
from execution.sampling import sample
from execution.step import Step
from targets.errors import IsaUnsupported
from tests.contract.executors.executor_suite import (
    CTE,
    STATE_BYTES,
    TKG,
    Reference,
    prompt_inputs,
    token_inputs,
    with_executable,
)
from tests.hang_guard import HANG_S
from tests.ranks.noise import draw_keys
from tests.ranks.toy import GLOBAL_TOPK, SLOTS, ToyBundle
from tests.ranks.toy_bundles import MakeToy
from tests.ranks.toy_groups import DECODE, PREFILL, loaded, rank_processes, start, step
from tests.repository import ROOT

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def eager(toy: MakeToy) -> ToyBundle:
    return toy("logits", 0)


@pytest.fixture(
    params=[("logits", 0), pytest.param(("logits", 1), marks=pytest.mark.toolchain), ("tokens", 0)], ids=str
)
def bundle(request: pytest.FixtureRequest, toy: MakeToy) -> ToyBundle:
    """One whose tokens the host picks, the same compiled, and one that picks them on the device."""
    return toy(*request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(eager: ToyBundle, forkservers: RankForkservers) -> AsyncIterator[tuple[RankGroup, psutil.Process]]:
    async with loaded(eager.manifest, eager.blobs, forkservers) as shared:
        yield shared


@pytest_asyncio.fixture(loop_scope="module")
async def group(shared: tuple[RankGroup, psutil.Process]) -> RankGroup:
    """The shared group, with a zeroed KV cache as if it were new."""
    await shared[0].zero_state(None)
    return shared[0]


@pytest.fixture
def process(shared: tuple[RankGroup, psutil.Process]) -> psutil.Process:
    return shared[1]


# Steps


async def test_steps_pick_what_the_model_picks(bundle: ToyBundle, forkservers: RankForkservers) -> None:
    reference = Reference(0)
    params = (7.0, 0.95, 0.8)
    steps = [
        (CTE, prompt_inputs([5, 6, 7], 0)),
        (CTE, prompt_inputs([9, 10, 11, 12, 13], 1)),
        (TKG, token_inputs([8, 14], [3, 5], [0, 1])),
        (TKG, token_inputs([9, 15], [4, 6], [0, 1])),
    ]
    async with loaded(bundle.manifest, bundle.blobs, forkservers) as (group, _):
        for number, (tag, inputs) in enumerate(steps):
            started = time.perf_counter()
            result = await group.run(step(tag, inputs, 3, params=params, seed=number))
            logits = reference.run(inputs)
            rows = len(logits)
            expected = sample(logits, torch.tensor([params] * rows), draw_keys(rows, number), GLOBAL_TOPK)
            assert result.tokens == expected[:, None].tolist()
            logprobs = logits.log_softmax(-1)
            torch.testing.assert_close(torch.tensor(result.logprobs)[:, 0], logprobs[range(rows), expected.tolist()])
            top = logprobs.topk(3)
            assert result.top_ids == top.indices[:, None].tolist()
            torch.testing.assert_close(torch.tensor(result.top_logprobs), top.values[:, None])
            assert 0 < result.duration_s <= time.perf_counter() - started


async def test_warming_up_writes_the_scratch_slot_only(group: RankGroup) -> None:
    first, expected = await group.run(PREFILL), await group.run(DECODE)
    await group.zero_state(None)
    await group.warm_up()
    assert (await group.run(PREFILL)).tokens == first.tokens
    await group.warm_up()
    assert (await group.run(DECODE)).tokens[0] == expected.tokens[0]


async def test_steps_that_do_not_fit_leave_the_group_serving(group: RankGroup) -> None:
    with pytest.raises(ExecutableUnknown, match="no executable 'x'"):
        await group.run(Step("x", {}))
    with pytest.raises(StepInvalid, match=r"inputs\[input_ids\]: got 48; accepted: 0 to 47"):
        await group.run(step(TKG, token_inputs([8, 48], [3, 0], [0, SLOTS])))
    assert len((await group.run(DECODE)).tokens) == 2


async def test_concurrent_steps_do_not_mix_their_inputs(group: RankGroup) -> None:
    prompts = [[5, 6, 7], [20], [9, 10, 11, 12], [30, 31]]
    steps = [step(CTE, prompt_inputs(prompt, 0), 1) for prompt in prompts]
    alone = [(await group.run(one)).top_logprobs for one in steps]
    together = await asyncio.gather(*(group.run(one) for one in steps * 5))
    assert [result.top_logprobs for result in together] == alone * 5


async def test_a_caller_that_gives_up_does_not_disturb_the_next(group: RankGroup) -> None:
    other = step(CTE, prompt_inputs([20], 0), 1)
    expected = await group.run(other)
    for _ in range(20):
        task = asyncio.create_task(group.run(PREFILL))
        await asyncio.sleep(0)
        task.cancel()
        assert (await group.run(other)).top_logprobs == expected.top_logprobs


# Weights and state


async def test_memory_and_state(group: RankGroup) -> None:
    assert group.state_bytes == STATE_BYTES
    assert group.weights_bytes == sum(tensor.nbytes for tensor in Reference(0).model.state_dict().values())
    assert await group.zero_state([0, 1]) == STATE_BYTES // (SLOTS + 1) * 2
    assert await group.zero_state(None) == STATE_BYTES
    with pytest.raises(SlotUnknown, match="slots: got 9"):
        await group.zero_state([9])


# Loading


async def test_progress_names_the_parts(eager: ToyBundle, forkservers: RankForkservers) -> None:
    group = await start(eager.manifest, eager.blobs, forkservers)
    progress: list[LoadProgress] = []
    await group.load(progress.append)
    assert progress == [LoadProgress(0, 1, 3, "weights"), LoadProgress(0, 2, 3, CTE), LoadProgress(0, 3, 3, TKG)]
    await group.close()


async def test_a_failed_load_is_named_and_cleans_up(
    eager: ToyBundle, forkservers: RankForkservers, tmp_path: Path
) -> None:
    log: list[str] = []
    before = rank_processes()
    blobs = eager.blobs | {eager.manifest.executables[1].blob: tmp_path / "absent"}
    group = await start(eager.manifest, blobs, forkservers, log)
    assert len(rank_processes() - before) == 1
    with pytest.raises(ExecutableInvalid, match=f"executable {TKG} cannot be loaded"):
        await group.load()
    assert rank_processes() == before
    assert log[:2] == ["0 Load failed", "0 Traceback (most recent call last):"]


async def test_a_host_without_the_instructions(eager: ToyBundle) -> None:
    manifest = with_executable(eager.manifest, format="aoti")
    manifest = msgspec.structs.replace(manifest, target=Target(kind="cpu", isa="x86-64-v9"))
    before = rank_processes()
    with pytest.raises(IsaUnsupported, match="x86-64-v9"):
        await start(manifest, eager.blobs, None)
    assert rank_processes() == before


async def test_a_process_that_never_gets_ready(
    eager: ToyBundle, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/ls")
    with pytest.raises(RankDied, match="rank 0 died: exit code 2"):
        await start(eager.manifest, eager.blobs, None)
    assert "execution.forkserver.server" in capfd.readouterr().err


# Processes


async def test_the_event_loop_runs_while_a_rank_computes(group: RankGroup, process: psutil.Process) -> None:
    process.suspend()
    task = asyncio.create_task(group.run(PREFILL))
    laps = []
    for _ in range(50):
        started = time.perf_counter()
        await asyncio.sleep(0.001)
        laps.append(time.perf_counter() - started)
    assert not task.done()
    process.resume()
    await task
    assert sorted(laps)[len(laps) // 2] < 0.02


async def test_an_idle_rank_sleeps(group: RankGroup, process: psutil.Process) -> None:
    await group.run(PREFILL)
    await asyncio.sleep(0.1)
    before = sum(process.cpu_times()[:2])
    await asyncio.sleep(0.5)
    assert sum(process.cpu_times()[:2]) - before <= 0.02


async def test_closing_is_no_death(eager: ToyBundle) -> None:
    async with loaded(eager.manifest, eager.blobs, None) as (group, _):
        await group.close()
        assert group.died.cancelled()
        for late in (group.warm_up(), group.run(PREFILL), group.stage_weights({0: eager.weights[1]})):
            with pytest.raises(RankDied, match="exit code 0"):
                await late


PARENT = """
import asyncio, sys
from pathlib import Path
from bundle.manifest_parser import parse_manifest
from execution.ranks.group import RankGroup

async def main():
    manifest = parse_manifest(Path(sys.argv[1]).read_bytes())
    group = await RankGroup.start(manifest, Path, num_threads=1)
    print("started", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_rank_ends_with_its_killed_parent(eager: ToyBundle, tmp_path: Path) -> None:
    (tmp_path / "manifest").write_bytes(eager.manifest.to_json())
    parent = psutil.Popen(
        [sys.executable, "-c", PARENT, tmp_path / "manifest"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert await asyncio.to_thread(parent.stdout.readline) == "started\n"
    processes = parent.children(recursive=True)
    assert [process.name() for process in processes] == ["kiln-forkserver", "kiln-rank-0"]
    parent.kill()
    parent.wait()
    gone, _ = await asyncio.to_thread(psutil.wait_procs, processes, timeout=HANG_S)
    assert len(gone) == len(processes)
