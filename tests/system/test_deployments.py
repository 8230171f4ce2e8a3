"""Deployments over a real compiler: declared, following an alias, awaiting weights, leased."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from kiln.bundle.v1 import bundle_pb2 as bundle
from kiln.bundle.v1 import bundle_pb2_grpc
from kiln.runtime.v1 import runtime_pb2 as runtime

from tests.servers.answers import reason_of
from tests.servers.stack import Stack
from tests.system.conftest import CONFIG, PIRATE, TINY
from tests.system.runtime_process import SMALL_CONFIG, RuntimeProcess, State, run_runtime, wait_until

EMPTY: dict[str, Any] = {"neuron_config": {**SMALL_CONFIG["neuron_config"], "save_sharded_checkpoint": False}}


@pytest.fixture(scope="module")
def story(stack: Stack) -> str:
    return stack.provide("side-story", TINY, SMALL_CONFIG)


@pytest.fixture(scope="module")
def pirate(stack: Stack) -> str:
    return stack.provide("side-pirate", PIRATE, SMALL_CONFIG)


@pytest.fixture
def bundles(stack: Stack) -> Iterator[bundle_pb2_grpc.BundleServiceStub]:
    with grpc.insecure_channel(stack.compiler) as channel:
        yield bundle_pb2_grpc.BundleServiceStub(channel)


@pytest.fixture
def process(stack: Stack, tmp_path: Path) -> Iterator[RuntimeProcess]:
    arguments = (f"--bundle-store={stack.home / 'store'}", "--follow-interval=0.2")
    with run_runtime(stack.compiler, tmp_path, *arguments) as started:
        yield started


@pytest.mark.slow
def test_declared_deployments_follow_their_file(process: RuntimeProcess, story: str, tmp_path: Path) -> None:
    file = tmp_path / "deployments.yaml"
    file.write_text(f"- {{id: one, ref: {story}}}\n")
    process.stop()
    process.start(f"--deployments={file}")
    process.wait_for("READY", deployment_id="one")
    file.write_text(f"- {{id: two, ref: {story}, cores: [3]}}\n")
    process.hang_up()
    wait_until(lambda: process.ids() == ["two"])
    assert list(process.wait_for("READY", deployment_id="two").cores) == [3]


@pytest.mark.slow
def test_weights_follow_a_real_alias(
    stack: Stack, process: RuntimeProcess, story: str, pirate: str, bundles: bundle_pb2_grpc.BundleServiceStub
) -> None:
    def point_at(version: str) -> None:
        bundles.SetAlias(bundle.SetAliasRequest(ref=version, alias="live"))

    # A fine-tune's weights for the executables that exist, as another version of the same name.
    sharded = stack.kiln("shard-weights", "side-story", "--model", PIRATE, "--name", "side-story").last
    version = bundles.GetBundle(bundle.GetBundleRequest(ref="side-story")).bundle
    assert (version.digest, version.contents) == (sharded["bundle"], bundle.BUNDLE_CONTENTS_WEIGHTS)
    point_at("side-story:v1")
    process.load("side-story@live", follow_alias=True)
    process.load(pirate, "pirate")
    assert process.generate() != process.generate(deployment_id="pirate")
    assert len(leases_on(bundles, version.digest)) == 0
    point_at(f"side-story:v{version.version}")
    wait_until(lambda: process.get().roles[0].weight_epoch == 2)
    deployment = process.get()
    assert (deployment.follow_message, deployment.roles[0].weights_digest) == ("", version.digest)
    assert deployment.roles[0].bundle_digest == story
    assert process.generate() == process.generate(deployment_id="pirate")
    wait_until(lambda: len(leases_on(bundles, version.digest)) == 1)
    with pytest.raises(grpc.RpcError) as caught:
        process.load_weights(pirate)
    assert reason_of(caught.value) == "ALIAS_FOLLOWED"
    # A version with other graphs: who moves the alias is refused, or told; the old weights serve, and all can see it.
    misfit = stack.provide("side-story", TINY, CONFIG)
    newest = bundles.GetBundle(bundle.GetBundleRequest(ref="side-story")).bundle.version
    refused = stack.kiln("bundles", "alias", "side-story", "live", "--require-compatible", check=False)
    assert (refused.exit_code, refused.last["error"]["reason"]) == (1, "ALIAS_INCOMPATIBLE")
    moved = stack.kiln("bundles", "alias", "side-story", "live").last
    assert "deployments that follow side-story@live keep the weights that they have" in moved["warnings"][0]
    wait_until(lambda: process.get().degraded)
    deployment = process.get()
    assert (deployment.state, deployment.followed_digest) == (State.STATE_READY, misfit)
    assert deployment.follow_message.startswith(
        f"side-story:v{newest} ({misfit}) does not serve: the bundle fits graph"
    )
    role = deployment.roles[0]
    assert (role.weights_version, role.weights_digest) == (f"side-story:v{version.version}", version.digest)
    assert process.generate() == process.generate(deployment_id="pirate")


@pytest.mark.slow
def test_executables_await_weights(
    stack: Stack, process: RuntimeProcess, pirate: str, bundles: bundle_pb2_grpc.BundleServiceStub
) -> None:
    empty = stack.provide("side-empty", PIRATE, EMPTY)
    contents = bundles.GetBundle(bundle.GetBundleRequest(ref=empty)).bundle.contents
    assert contents == bundle.BUNDLE_CONTENTS_EXECUTABLES
    assert process.load(empty).state == State.STATE_AWAITING_WEIGHTS
    with pytest.raises(grpc.RpcError) as caught:
        process.generate()
    assert reason_of(caught.value) == "DEPLOYMENT_NOT_READY"
    process.kill()
    process.start()
    process.wait_for("AWAITING_WEIGHTS")
    rank = process.ranks()[0]
    rank.kill()
    wait_until(lambda: process.ranks() not in ([], [rank]))
    process.wait_for("AWAITING_WEIGHTS")
    result = process.load_weights(pirate)
    assert (result.weight_epoch, result.deployment.state) == (1, State.STATE_READY)
    whole = process.load(pirate, "whole")
    assert result.deployment.weights_bytes == whole.weights_bytes > 0
    assert process.generate() == process.generate(deployment_id="whole")
    process.control.UnloadBundle(runtime.UnloadBundleRequest(deployment_id="d"))
    wait_until(lambda: not leases_on(bundles, empty))


def leases_on(bundles: bundle_pb2_grpc.BundleServiceStub, digest: str) -> set[str]:
    """Holders of leases. The leases of runtimes that earlier tests have stopped last for a day."""
    now_s = time.time()
    leases = bundles.ListLeases(bundle.ListLeasesRequest(digest=digest)).leases
    assert all(lease.expire_time.seconds > now_s for lease in leases)
    return {lease.holder for lease in leases}
