"""Forkservers that several groups come from."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from bundle.host.confinement import RANK
from execution.errors import RankDied
from execution.ranks.forkservers import RankForkservers
from execution.ranks.group import RankGroup
from execution.threads import SHORT_SPIN_TURNS
from tests.contract.executors.executor_suite import Reference, prompt_inputs
from tests.hang_guard import HANG_S, until
from tests.processes import lives, name_of, note_others, own_children
from tests.ranks.toy import ToyBundle
from tests.ranks.toy_bundles import MakeToy
from tests.ranks.toy_groups import PREFILL, rank_processes, start
from tests.running_time import running_time

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def eager(toy: MakeToy) -> ToyBundle:
    return toy("logits", 0)


@pytest.fixture
def pair(toy: MakeToy) -> ToyBundle:
    return toy("logits", 0, 2)


@pytest.fixture(scope="module", autouse=True)
def _others() -> None:
    note_others()


@pytest.fixture(scope="module")
def forkservers() -> Iterator[RankForkservers]:
    # More ranks than any host has processors for. A watch holds a socket from its first look on, which would count.
    with RankForkservers(num_ranks=1 << 16, patience_s=3600) as forkservers:
        yield forkservers
    assert [one for one in own_children() if name_of(one).startswith("kiln")] == []


@asynccontextmanager
async def started(
    bundle: ToyBundle, forkservers: RankForkservers, *, num_threads: int = 1
) -> AsyncIterator[tuple[RankGroup, list[psutil.Process]]]:
    """A group and its processes in rank order, which are gone afterwards."""
    before = rank_processes()
    group = await start(bundle.manifest, bundle.blobs, forkservers, [], num_threads=num_threads)
    processes = sorted(rank_processes() - before, key=lambda process: process.pid)
    try:
        yield group, processes
    finally:
        await group.close()
        assert not rank_processes() & set(processes)


def forkserver_of(process: psutil.Process) -> psutil.Process:
    parent = process.parent()
    assert parent is not None
    assert parent.name() == "kiln-forkserver"
    return parent


def descriptors(pid: int) -> dict[int, str]:
    """The targets of a process's open descriptors, without those that close meanwhile."""
    found = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found[int(path.name)] = str(path.readlink()).partition(":")[0]
        except FileNotFoundError:
            continue
    return found


def num_descriptors(pid: int) -> Counter[str]:
    """How many there are of each kind but memory, which goes with the objects of a group."""
    return Counter(kind for kind in descriptors(pid).values() if kind != "/memfd")


async def test_a_warm_forkserver_has_loaded_what_its_first_rank_needs(eager: ToyBundle) -> None:
    executable_format = eager.manifest.executables[0].format
    with RankForkservers(num_ranks=1 << 16, patience_s=3600) as forkservers:
        known = {one.pid for one in own_children()}
        await forkservers.warm_up(1, executable_format)
        (forkserver,) = [one for one in own_children() if one.pid not in known]
        assert any("libtorch" in mapped.path for mapped in forkserver.memory_maps())
        spent_s = forkserver.cpu_times().user
        async with started(eager, forkservers) as (group, (process,)):
            assert forkserver_of(process).pid == forkserver.pid
            await group.load()
        assert forkserver.cpu_times().user - spent_s < spent_s / 2


async def test_groups_share_what_has_been_loaded(
    eager: ToyBundle, pair: ToyBundle, forkservers: RankForkservers
) -> None:
    expected = Reference(0).run(prompt_inputs([5, 6, 7], 0)).argmax(-1, keepdim=True).tolist()
    async with started(pair, forkservers) as (two, pair_processes):
        async with started(eager, forkservers) as (one, processes):
            names = [process.name() for process in (*pair_processes, *processes)]
            assert names == ["kiln-rank-0", "kiln-rank-1", "kiln-rank-0"]
            assert len({forkserver_of(process).pid for process in (*pair_processes, *processes)}) == 1
            for group in (one, two):
                await group.load()
                assert (await group.run(PREFILL)).tokens == expected
        assert (await two.run(PREFILL)).tokens == expected


async def test_a_rank_has_a_session_and_descriptors_of_its_own(
    pair: ToyBundle, forkservers: RankForkservers, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only root sees the descriptors of a private process.
    monkeypatch.setattr("execution.ranks.handle.RANK", msgspec.structs.replace(RANK, is_private=False))
    async with started(pair, forkservers) as (_, processes):
        for process in processes:
            assert os.getsid(process.pid) == process.pid
            assert process.num_threads() == 1
            found = descriptors(process.pid)
            assert (found.pop(0), found.pop(1), found.pop(2)) == ("/dev/null", "pipe", "pipe")
            # Control; step memory and collective memory, and what mmap keeps of each.
            assert sorted(found.values()) == ["/memfd"] * 4 + ["socket"]


async def test_ranks_compute_with_the_threads_that_they_are_given(
    eager: ToyBundle, forkservers: RankForkservers
) -> None:
    async with started(eager, forkservers) as (_, (one,)), started(eager, forkservers, num_threads=2) as (_, (two,)):
        for process, num_threads in ((one, "1"), (two, "2")):
            environment = forkserver_of(process).environ()
            told = (environment["OMP_NUM_THREADS"], environment["GOMP_SPINCOUNT"])
            assert told == (num_threads, str(SHORT_SPIN_TURNS))
            assert forkserver_of(process).num_threads() == 1


async def settled_descriptors(pid: int) -> Counter[str]:
    """Open descriptors of a forkserver that has closed those of its ranks, each of which has one for its end."""
    # Later kernels have a file system of their own for them.
    await until(lambda: not {"anon_inode", "pidfd"} & num_descriptors(pid).keys())
    return num_descriptors(pid)


async def test_nothing_stays_open(pair: ToyBundle, forkservers: RankForkservers) -> None:
    async with started(pair, forkservers) as (_, processes):
        parent = forkserver_of(processes[0])
    before = num_descriptors(os.getpid()), await settled_descriptors(parent.pid)
    for _ in range(3):
        async with started(pair, forkservers):
            pass
        assert parent.children() == []
    assert (num_descriptors(os.getpid()), await settled_descriptors(parent.pid)) == before


async def test_a_start_that_is_given_up(pair: ToyBundle) -> None:
    before = num_descriptors(os.getpid())
    with RankForkservers() as forkservers:
        for delay_s in (0.0, 0.2):
            # The forkserver loads torch meanwhile.
            starting = asyncio.create_task(start(pair.manifest, pair.blobs, forkservers, []))
            await asyncio.sleep(delay_s)
            await assert_given_up(starting)
        async with started(pair, forkservers) as (_, processes):
            parent = forkserver_of(processes[0])
        for delay_s in (0.0, 0.005, 0.01, 0.02):
            # It forks meanwhile.
            starting = asyncio.create_task(start(pair.manifest, pair.blobs, forkservers, []))
            await asyncio.sleep(delay_s)
            if starting.done() and delay_s > 0:
                # Forked in less than that.
                await (await starting).close()
            else:
                await assert_given_up(starting)
        await until(lambda: not parent.children())
    assert num_descriptors(os.getpid()) == before


async def assert_given_up(starting: asyncio.Task[RankGroup]) -> None:
    assert not starting.done()
    starting.cancel()
    with running_time() as taken, pytest.raises(asyncio.CancelledError):
        await starting
    assert taken.s < 0.5


async def test_ranks_die_with_their_forkserver_and_the_next_start_makes_another(
    pair: ToyBundle, forkservers: RankForkservers
) -> None:
    async with started(pair, forkservers) as (group, processes):
        with running_time() as taken:
            forkserver_of(processes[0]).kill()
            async with asyncio.timeout(HANG_S):
                assert (await group.died).cause == "SIGKILL"
        assert taken.s < 1
        await until(lambda: not any(map(lives, processes)))
        with pytest.raises(RankDied):
            await group.run(PREFILL)
    async with started(pair, forkservers) as (group, _):
        await group.load()
        assert len((await group.run(PREFILL)).tokens) == 1


async def test_a_rank_that_ends_does_not_concern_other_groups(eager: ToyBundle, forkservers: RankForkservers) -> None:
    async with started(eager, forkservers) as (left, _), started(eager, forkservers) as (group, (process,)):
        await left.load()
        process.kill()
        assert (await group.died).cause == "SIGKILL"
        assert len((await left.run(PREFILL)).tokens) == 1
