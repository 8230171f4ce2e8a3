"""How rank processes end: killed, closed, or with their parent."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from execution.errors import (
    RankDied,
)
from execution.ranks.forkservers import RankForkservers
from tests.hang_guard import HANG_S
from tests.ranks.toy import ToyBundle
from tests.ranks.toy_bundles import MakeToy
from tests.ranks.toy_groups import PREFILL, loaded
from tests.repository import ROOT
from tests.running_time import running_time

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def eager(toy: MakeToy) -> ToyBundle:
    return toy("logits", 0)


async def test_a_killed_rank_fails_what_waits_and_what_follows(eager: ToyBundle, forkservers: RankForkservers) -> None:
    async with loaded(eager.manifest, eager.blobs, forkservers) as (group, process):
        process.suspend()
        waiting = [asyncio.create_task(group.run(PREFILL)), asyncio.create_task(group.zero_state(None))]
        await asyncio.sleep(0.05)
        with running_time() as taken:
            process.kill()
            async with asyncio.timeout(HANG_S):
                death = await group.died
        assert taken.s < 0.5
        assert (death.rank, death.exit_code, death.signal, death.reason) == (0, None, "SIGKILL", "RANK_DIED")
        for task in waiting:
            with pytest.raises(RankDied, match="rank 0 died: SIGKILL"):
                await task
        with pytest.raises(RankDied):
            await group.run(PREFILL)
        await group.close()


async def test_closing_is_no_death(eager: ToyBundle) -> None:
    async with loaded(eager.manifest, eager.blobs, None) as (group, _):
        await group.close()
        assert group.died.cancelled()
        for late in (group.warm_up(), group.run(PREFILL), group.stage_weights({0: eager.weights[1]})):
            with pytest.raises(RankDied, match="exit code 0"):
                await late


async def test_closing_ends_a_rank_that_does_not_listen(
    eager: ToyBundle, forkservers: RankForkservers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("execution.ranks.handle.CLOSE_GRACE_S", 0.1)
    async with loaded(eager.manifest, eager.blobs, forkservers) as (group, process):
        process.suspend()
        waiting = asyncio.create_task(group.run(PREFILL))
        await asyncio.sleep(0.05)
        await group.close()
        with pytest.raises(RankDied, match="SIGKILL"):
            await waiting


PARENT = """
import asyncio, sys
from pathlib import Path
from bundle.manifest import parse_manifest
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
