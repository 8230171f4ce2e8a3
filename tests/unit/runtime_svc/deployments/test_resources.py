from typing import Any

import msgspec
import pytest

from bundle.manifest import Manifest, WeightTensor
from execution.device_errors import DeviceUnsuitable
from execution.ranks.step_memory import StepLayout
from runtime_svc.bundles.source import ResolvedBundle
from runtime_svc.deployments.cores import CorePool
from runtime_svc.deployments.deployment import Deployment
from runtime_svc.deployments.deployment_spec import DeploymentDefaults, DeploymentSpec, Origin
from runtime_svc.deployments.memory import CoreMemory, MemoryPool
from runtime_svc.deployments.records import WeightsRecord
from runtime_svc.deployments.resources import Resources, check_bundle
from runtime_svc.errors import MemoryUnavailable
from targets.neuron import TRN2
from tests.bundles.manifests import DIGEST, make_manifest, with_mutable_set
from tests.bundles.neffs import with_neffs

STATE_BYTES = 2 * 5 * 64 * 4


def neuron_manifest(num_weights: int) -> Manifest:
    """A bundle for trn2 of two ranks, with so many float32 weights on each."""
    return with_weights(with_neffs(make_manifest(tp_degree=2)), num_weights, 0, 1)


def with_weights(manifest: Manifest, num_weights: int, *ranks: int) -> Manifest:
    """The bundle with another number of float32 weights on some ranks; their files are much larger."""
    (model,) = manifest.weight_sets
    changes: Any = {"tensors": (WeightTensor(name="w", dtype="float32", shape=(num_weights,)),), "size_bytes": 1 << 40}
    shards = [msgspec.structs.replace(one, **changes) if one.rank in ranks else one for one in model.shards]
    return msgspec.structs.replace(manifest, weight_sets=(msgspec.structs.replace(model, shards=tuple(shards)),))


def make_deployment(manifest: Manifest) -> Deployment:
    deployment = Deployment(DeploymentSpec("d", "story"), Origin.RPC, DeploymentDefaults(1, None))
    deployment.find(ResolvedBundle("story", DIGEST, manifest, ()))
    return deployment


def test_weights_and_state_on_cores_take_none_of_the_hosts_memory() -> None:
    manifest = neuron_manifest(1000)
    step_bytes = StepLayout.of(manifest).size_bytes
    resources = Resources(CorePool(2), MemoryPool(step_bytes), TRN2)
    deployment = make_deployment(manifest)
    resources.reserve(deployment, manifest)
    assert (deployment.cores, resources.memory.free_bytes) == ((0, 1), 0)
    assert deployment.core_memory is not None
    assert deployment.core_memory.list_used() == [4 * 1000 + STATE_BYTES] * 2
    resources.release(deployment)
    assert deployment.core_memory is None
    assert resources.memory.free_bytes == step_bytes


def test_rank_that_does_not_fit_its_core_is_refused() -> None:
    assert TRN2.core_bytes is not None
    core_bytes = 2 * TRN2.core_bytes
    manifest = neuron_manifest(core_bytes // 4)
    resources = Resources(CorePool(2), MemoryPool(1 << 40), TRN2)
    with pytest.raises(MemoryUnavailable) as caught:
        resources.reserve(make_deployment(manifest), manifest)
    assert caught.value.metadata["needed_bytes"] == str(core_bytes + STATE_BYTES)
    assert caught.value.metadata["total_bytes"] == str(core_bytes)
    assert resources.cores.free == (0, 1)
    assert caught.value.metadata["missing_bytes"] == str(STATE_BYTES)


class TestStaging:
    """Weights are on cores twice while a swap is staged."""

    def test_weights_count_twice_until_the_swap_is_over(self) -> None:
        manifest = neuron_manifest(1000)
        memory = CoreMemory(2 * 4000 + STATE_BYTES, manifest, manifest)
        memory.stage(manifest)
        assert memory.list_used() == [2 * 4000 + STATE_BYTES] * 2
        memory.unstage()
        assert memory.list_used() == [4000 + STATE_BYTES] * 2

    def test_mutable_sets_count_once(self) -> None:
        manifest = with_mutable_set(neuron_manifest(1000), (3, 8, 2))
        memory = CoreMemory(1 << 20, manifest, neuron_manifest(500))
        memory.stage(manifest)
        assert memory.list_used() == [4 * 1500 + 4 * 48 + STATE_BYTES] * 2
        memory.unstage()
        assert memory.list_used() == [4 * 500 + 4 * 48 + STATE_BYTES] * 2

    def test_refusal_names_what_the_shortest_core_lacks_and_changes_nothing(self) -> None:
        manifest = with_weights(neuron_manifest(1000), 1001, 1)
        memory = CoreMemory(2 * 4004 + STATE_BYTES - 1, manifest, manifest)
        with pytest.raises(MemoryUnavailable, match="4004 bytes of memory are needed on a core; 4003 of") as caught:
            memory.stage(manifest)
        assert caught.value.metadata["missing_bytes"] == "1"
        assert memory.list_used() == [4000 + STATE_BYTES, 4004 + STATE_BYTES]

    def test_first_weights_take_the_room_that_was_kept_for_them(self) -> None:
        """A core that has room for one set of weights takes the first ones that a bundle without weights gets."""
        assert TRN2.core_bytes is not None
        manifest = neuron_manifest((2 * TRN2.core_bytes - STATE_BYTES) // 4)
        resources = Resources(CorePool(2), MemoryPool(1 << 40), TRN2)
        deployment = make_deployment(manifest)
        deployment.weights = None
        resources.reserve(deployment, manifest)
        resources.stage(deployment, manifest)
        deployment.weights = WeightsRecord(ref="story", digest=DIGEST)
        with pytest.raises(MemoryUnavailable):
            resources.stage(deployment, manifest)


def test_logical_cores_of_another_size_are_refused_by_field() -> None:
    resources = Resources(CorePool(2), MemoryPool(1 << 40), TRN2, 2)
    bundle = ResolvedBundle("story", DIGEST, with_neffs(make_manifest(), lnc=1), ())
    with pytest.raises(DeviceUnsuitable, match=r"target\.lnc: got 1; accepted: 2"):
        check_bundle(bundle, resources)
    check_bundle(ResolvedBundle("story", DIGEST, with_neffs(make_manifest()), ()), resources)
