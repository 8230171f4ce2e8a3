"""Writes to mutable weight sets of rank processes that compute together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from bundle.manifest import ADAPTER_WEIGHTS, MODEL_WEIGHTS
from execution.errors import EntryUnknown, RankDied, WeightSetNotMutable, WeightsInvalid
from execution.ranks.forkservers import RankForkservers
from execution.ranks.group import RankGroup
from tests.contract.executors.executor_suite import CTE, Reference, prompt_inputs
from tests.hang_guard import HANG_S
from tests.ranks.toy import ToyBundle, make_model, make_writable, save_entry
from tests.ranks.toy_bundles import MakeToy
from tests.ranks.toy_groups import loaded_group, step

#: No rank holds a part of it: each has the whole.
NAMES = ("embedding.weight",)


@pytest.fixture
def pair(toy: MakeToy) -> ToyBundle:
    return toy("logits", 0, 2)


@pytest_asyncio.fixture
async def group(pair: ToyBundle, forkservers: RankForkservers) -> AsyncIterator[RankGroup]:
    async with loaded_group(make_writable(pair.manifest, NAMES), pair.blobs, forkservers) as (group, _):
        yield group


async def assert_holds(group: RankGroup, seed: int, entries: Mapping[int, int]) -> None:
    """The group computes with the weights of `seed` and embeddings of other seeds, by token; the rest is zeros."""
    inputs, reference = prompt_inputs([7, 8], 0), Reference(seed)
    reference.model.embedding.weight.zero_()
    for token, other in entries.items():
        reference.model.embedding.weight[token] = make_model(other).embedding.weight[token]
    expected = reference.run(inputs).log_softmax(-1).topk(3)
    result = await group.run(step(CTE, inputs, 3))
    torch.testing.assert_close(torch.tensor(result.top_logprobs), expected.values[:, None])
    assert result.top_ids == expected.indices[:, None].tolist()


def save_entries(seed: int, token: int, directory: Path) -> dict[int, Path]:
    """Files of one entry, by rank."""
    return {rank: save_entry(seed, token, directory / f"{seed}-{token}-{rank}", NAMES) for rank in range(2)}


async def test_entries_are_written_on_all_ranks(group: RankGroup, pair: ToyBundle, tmp_path: Path) -> None:
    await assert_holds(group, 0, {})
    await group.write(ADAPTER_WEIGHTS, 7, save_entries(0, 7, tmp_path))
    await group.write(ADAPTER_WEIGHTS, 8, save_entries(1, 8, tmp_path))
    await assert_holds(group, 0, {7: 0, 8: 1})
    await group.stage_weights(pair.shards[1])
    await group.swap_weights()
    await assert_holds(group, 1, {7: 0, 8: 1})
    await group.write(ADAPTER_WEIGHTS, 7, None)
    await assert_holds(group, 1, {8: 1})


async def test_what_one_rank_refuses_changes_no_rank(group: RankGroup, tmp_path: Path) -> None:
    await group.write(ADAPTER_WEIGHTS, 7, save_entries(0, 7, tmp_path))
    others = save_entries(1, 7, tmp_path)
    with pytest.raises(WeightsInvalid, match=r"weight file of rank 1 does not fit: .*FileNotFoundError"):
        await group.write(ADAPTER_WEIGHTS, 7, others | {1: tmp_path / "absent"})
    with pytest.raises(WeightSetNotMutable, match="got 'model'"):
        await group.write(MODEL_WEIGHTS, 7, others)
    with pytest.raises(EntryUnknown, match="got 48; accepted: 0 to 47"):
        await group.write(ADAPTER_WEIGHTS, 48, None)
    await assert_holds(group, 0, {7: 0})


async def test_a_write_waits_for_steps_and_ranks_that_write_apart_end(group: RankGroup, tmp_path: Path) -> None:
    paths = save_entries(0, 7, tmp_path)
    # As steps that follow each other hold it.
    async with group._turn:
        writing = asyncio.create_task(group.write(ADAPTER_WEIGHTS, 7, paths))
        await asyncio.sleep(0)
        # Ranks answer in order, so by then they have checked their files, and would have written.
        for _ in range(2):
            await group.discard_staged()
        assert not writing.done()
        paths[1].unlink()
    async with asyncio.timeout(HANG_S):
        with pytest.raises(RankDied, match="rank 1 died"):
            await writing
    assert group.died.done()
