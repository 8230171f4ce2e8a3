"""Rank processes with NeuronCores, on a stand-in for libnrt."""

from __future__ import annotations

from pathlib import Path

import pytest

from execution.device_errors import DeviceHung
from execution.errors import StepFailed
from execution.ranks.forkservers import RankForkservers
from execution.ranks.group import RankGroup
from tests.neuron.host import Faults, neuron_host, neuron_pair, nrt_library
from tests.ranks.toy import ToyBundle
from tests.ranks.toy_groups import PREFILL
from tests.service.execution.test_tensor_parallel import with_rank

__all__ = ["neuron_host", "neuron_pair", "nrt_library"]


async def test_rank_that_waits_for_one_that_failed_ends_the_group(
    neuron_host: Faults, neuron_pair: ToyBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank is out of range and fails its step; the core of the other one times out in its collective."""
    monkeypatch.setenv("NEURON_RT_EXEC_TIMEOUT", "3")
    shards = {0: neuron_pair.shards[0][0], 1: with_rank(neuron_pair.shards[0][1], 7, tmp_path)}
    with RankForkservers() as forkservers:
        group = await RankGroup.start(
            neuron_pair.manifest, neuron_pair.blobs, num_threads=1, open_forkserver=forkservers.open, cores=(0, 1)
        )
        await group.load()
        await group.stage_weights(shards)
        await group.swap_weights()
        with pytest.raises(StepFailed, match=r"NRT_EXEC_OOB \(1006\)"):
            await group.run(PREFILL)
        verdict = await group.died
        assert (type(verdict), verdict.rank) == (DeviceHung, 0)
        await group.close()
