"""Collectives among threads: the native code does not know whether its peers are processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from execution.collectives.communicator import SharedCommunicator
from execution.collectives.memory import CollectiveMemory
from execution.collectives.operators import CollectiveError, use_communicator
from execution.errors import TooManyRanks
from tests.hang_guard import HANG_S
from tests.memory_files import count_held
from tests.running_time import running_time

CHUNK_BYTES = 256 * 1024
MAX_RANKS = 256
#: Items: a part of a chunk, a chunk, and chunks with a rest.
COUNTS = [1, 1000, CHUNK_BYTES // 4, 3 * CHUNK_BYTES // 4 + 77]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int32]

Run = Callable[[SharedCommunicator, int], Tensor]


def run_ranks(tp_degree: int, run: Run, timeout_s: float = HANG_S) -> list[Tensor]:
    memory = CollectiveMemory(tp_degree)

    def run_one(rank: int) -> Tensor:
        with SharedCommunicator(memory.fd, rank, tp_degree, timeout_s).joined() as communicator:
            return run(communicator, rank)

    with ThreadPoolExecutor(tp_degree) as pool:
        results = list(pool.map(run_one, range(tp_degree)))
    memory.close()
    return results


def make_parts(tp_degree: int, dtype: torch.dtype, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tp_degree)
    if dtype is torch.int32:
        return [torch.randint(-(1 << 30), 1 << 30, shape, dtype=dtype, generator=generator) for _ in range(tp_degree)]
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(tp_degree)]


def add_in_order(parts: list[Tensor]) -> Tensor:
    wide = torch.float32 if parts[0].is_floating_point() else torch.int32
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tp_degree", [2, 3, 4])
def test_sums_are_added_in_rank_order(tp_degree: int, dtype: torch.dtype, count: int) -> None:
    parts = make_parts(tp_degree, dtype, count)
    expected = add_in_order(parts)
    for total in run_ranks(tp_degree, lambda communicator, rank: communicator.all_reduce(parts[rank])):
        assert torch.equal(total, expected)


@pytest.mark.parametrize("shape", [(7,), (3, 1), (2, 3, 5), (3, CHUNK_BYTES // 4 + 9), (CHUNK_BYTES // 8, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_are_joined_along_the_last_axis(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    parts = make_parts(3, dtype, *shape)
    for whole in run_ranks(3, lambda communicator, rank: communicator.all_gather(parts[rank])):
        assert torch.equal(whole, torch.cat(parts, dim=-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_narrow_number_is_widened_and_rounded_as_torch_does(dtype: torch.dtype) -> None:
    everything = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    parts = [everything, everything.flip(0).roll(77)]
    for total in run_ranks(2, lambda communicator, rank: communicator.all_reduce(parts[rank])):
        torch.testing.assert_close(total, add_in_order(parts), rtol=0, atol=0, equal_nan=True)


def test_max_ranks() -> None:
    """Sums of a size that every rank adds up by itself, and of one that the ranks divide."""
    for count in (1, CHUNK_BYTES // 4):
        parts = make_parts(MAX_RANKS, torch.float32, count)
        expected = add_in_order(parts)
        for total in run_ranks(MAX_RANKS, lambda communicator, rank: communicator.all_reduce(parts[rank])):  # noqa: B023
            assert torch.equal(total, expected)


def test_more_ranks_are_refused() -> None:
    with pytest.raises(TooManyRanks) as caught:
        CollectiveMemory(MAX_RANKS + 1)
    (violation,) = caught.value.violations
    assert (violation.field, violation.value, violation.accepted) == ("tp_degree", "257", "1 to 256")


@pytest.mark.parametrize("tp_degree", [2, 4])
def test_many_collectives_in_a_row_keep_apart(tp_degree: int) -> None:
    """Sums of sizes that take one barrier and two, by turns."""

    def run(communicator: SharedCommunicator, rank: int) -> Tensor:
        for number in range(300):
            size = (5, 20_000, 70_000)[number % 3]
            total = communicator.all_reduce(torch.full((size,), float(rank + number)))
            assert (total == sum(range(tp_degree)) + tp_degree * number).all()
            whole = communicator.all_gather(torch.tensor([rank + number], dtype=torch.int32))
            assert whole.tolist() == [other + number for other in range(tp_degree)]
        return whole

    assert len(run_ranks(tp_degree, run)) == tp_degree


def test_the_operators_go_through_the_threads_communicator() -> None:
    def run(_communicator: SharedCommunicator, rank: int) -> Tensor:
        part = torch.arange(6.0).view(2, 3).t() * (rank + 1)
        return torch.ops.kiln.all_gather(torch.ops.kiln.all_reduce(part, 2), 2)

    for result in run_ranks(2, run):
        assert torch.equal(result, torch.cat([torch.arange(6.0).view(2, 3).t() * 3] * 2, -1))


def test_operators_without_their_ranks(memory: CollectiveMemory) -> None:
    with pytest.raises(CollectiveError, match="a collective of 2 ranks in a thread that uses no communicator"):
        torch.ops.kiln.all_reduce(torch.ones(1), 2)
    with (
        use_communicator(SharedCommunicator(memory.fd, 0, 2)),
        pytest.raises(CollectiveError, match="a collective of 4 ranks among 2"),
    ):
        torch.ops.kiln.all_reduce(torch.ones(1), 4)


@pytest.mark.parametrize("operator", [torch.ops.kiln.all_reduce, torch.ops.kiln.all_gather], ids=str)
def test_graphs_cannot_ask_for_what_is_not_carried(operator: torch._ops.OpOverloadPacket) -> None:
    with pytest.raises(TypeError, match=r"a collective of torch.float64; accepted: torch.float32, "):
        operator(torch.ones(1, dtype=torch.float64, device="meta"), 2)
    with pytest.raises(ValueError, match="a collective of 0 axes among 2 ranks; accepted: at least 1 of each"):
        operator(torch.ones((), device="meta"), 2)


# Failures


@pytest.fixture
def memory() -> Iterator[CollectiveMemory]:
    memory = CollectiveMemory(2)
    yield memory
    memory.close()


def test_a_rank_that_waits_is_woken_by_an_abort(memory: CollectiveMemory) -> None:
    communicator = SharedCommunicator(memory.fd, 0, 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(communicator.all_reduce, torch.ones(3))
        time.sleep(0.1)
        assert not waiting.done()
        with running_time() as taken:
            memory.abort()
            with pytest.raises(CollectiveError, match="another rank failed"):
                waiting.result(HANG_S)
    assert taken.s < 0.5
    assert communicator.is_aborted
    with pytest.raises(CollectiveError, match="another rank failed"):
        communicator.all_gather(torch.ones(3))


def test_a_rank_that_nobody_joins_gives_up(memory: CollectiveMemory) -> None:
    with pytest.raises(CollectiveError, match="another rank did not come"):
        SharedCommunicator(memory.fd, 0, 2, timeout_s=0.2).all_reduce(torch.ones(3))
    with pytest.raises(CollectiveError, match="another rank failed"):
        SharedCommunicator(memory.fd, 1, 2).all_reduce(torch.ones(3))


def test_a_reset_makes_collectives_possible_again(memory: CollectiveMemory) -> None:
    communicators = [SharedCommunicator(memory.fd, rank, 2, timeout_s=HANG_S) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(communicators[0].all_reduce, torch.ones(3))
        time.sleep(0.05)
        communicators[1].abort()
        with pytest.raises(CollectiveError):
            waiting.result(HANG_S)
        memory.reset()
        assert not communicators[0].is_aborted
        totals = pool.map(lambda communicator: communicator.all_reduce(torch.ones(3)), communicators)
        assert [total.tolist() for total in totals] == [[2.0] * 3] * 2


def test_closed_memory_goes_back_to_the_host_though_an_error_keeps_the_object() -> None:
    before = count_held("kiln-collectives")
    memory = CollectiveMemory(2)
    assert count_held("kiln-collectives") > before
    memory.close()
    assert count_held("kiln-collectives") == before
    memory.reset()
    memory.abort()
