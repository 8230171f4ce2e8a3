import msgspec
import pytest

from bundle.manifest import Manifest, WeightTensor
from execution.ranks.step_memory import StepLayout
from runtime_svc.bundles.source import ResolvedBundle
from runtime_svc.deployments.cores import CorePool
from runtime_svc.deployments.deployment import Deployment
from runtime_svc.deployments.deployment_spec import DeploymentDefaults, DeploymentSpec, Origin
from runtime_svc.deployments.memory import MemoryPool, core_need
from runtime_svc.deployments.resources import Resources
from runtime_svc.errors import MemoryUnavailable
from targets.neuron import TRN2
from tests.bundles.manifests import DIGEST, make_manifest
from tests.bundles.neffs import with_neffs

STATE_BYTES = 2 * 5 * 64 * 4


def neuron_manifest(num_weights: int) -> Manifest:
    """A bundle for trn2 of two ranks, with so many float32 weights on each."""
    manifest = with_neffs(make_manifest(tp_degree=2))
    (model,) = manifest.weight_sets
    tensors = (WeightTensor(name="w", dtype="float32", shape=(num_weights,)),)
    shards = tuple(msgspec.structs.replace(shard, size_bytes=1 << 40, tensors=tensors) for shard in model.shards)
    return msgspec.structs.replace(manifest, weight_sets=(msgspec.structs.replace(model, shards=shards),))


def make_deployment(manifest: Manifest) -> Deployment:
    deployment = Deployment(DeploymentSpec("d", "story"), Origin.RPC, DeploymentDefaults(1, None))
    deployment.find(ResolvedBundle("story", DIGEST, manifest, ()))
    return deployment


def test_weights_and_state_on_cores_take_none_of_the_hosts_memory() -> None:
    manifest = neuron_manifest(1000)
    assert core_need(manifest, manifest) == 4 * 1000 + STATE_BYTES
    step_bytes = StepLayout.of(manifest).size_bytes
    resources = Resources(CorePool(2), MemoryPool(step_bytes), TRN2)
    deployment = make_deployment(manifest)
    resources.reserve(deployment, manifest)
    assert (deployment.cores, resources.memory.free_bytes) == ((0, 1), 0)
    resources.release(deployment)
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
