"""Steps of the golden check on cores, by a stand-in for libnrt: in processes of ranks, which give the core back."""

from __future__ import annotations

import pytest
import torch

from compiler_svc.golden.steps import loaded_steps
from execution.device_errors import DeviceBusy, DeviceUnsuitable
from execution.ranks.forkservers import RankForkservers
from execution.step import StepForm
from tests.contract.executors.executor_suite import CTE, Reference, prompt_inputs
from tests.neuron.host import neuron_forkservers, neuron_host, neuron_pair, neuron_toy, nrt_library
from tests.ranks.toy import ToyBundle

__all__ = ["neuron_forkservers", "neuron_host", "neuron_pair", "neuron_toy", "nrt_library"]


def test_neffs_compute_what_is_compared(neuron_toy: ToyBundle, neuron_forkservers: RankForkservers) -> None:
    manifest = neuron_toy.manifest
    executable = next(one for one in manifest.executables if one.tag == CTE)
    form = StepForm(manifest, executable)
    inputs = form.make_idle()
    form.put_tokens(inputs, 0, [5, 6, 7], start=0, blocks=[0])
    expected = Reference(0).run(prompt_inputs([5, 6, 7], 0))
    for _ in range(2):
        with loaded_steps(manifest, neuron_toy.blob_path, neuron_forkservers.open) as steps:
            logits = steps.run(executable, inputs)["logits"]
            torch.testing.assert_close(logits[0], expected[0], rtol=0, atol=1e-5)
            # Which has a build look for another way.
            with pytest.raises(DeviceBusy), loaded_steps(manifest, neuron_toy.blob_path, neuron_forkservers.open):
                pass


def test_fewer_cores_than_ranks_are_no_cores_for_the_check(
    neuron_pair: ToyBundle, neuron_forkservers: RankForkservers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container has one core: builds look for another way, as they do for busy ones."""
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "24")
    accepted = "accepted: 0 to 0, the cores that NEURON_RT_VISIBLE_CORES gives"
    with (
        pytest.raises(DeviceUnsuitable, match=f"cores: got 0, 1; {accepted}"),
        loaded_steps(neuron_pair.manifest, neuron_pair.blob_path, neuron_forkservers.open),
    ):
        pass
