"""Loading a model: under an id that was chosen before, as a gateway needs it, and where others hold what it needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from google.rpc import status_pb2
from kiln.runtime.v1 import runtime_pb2
from kiln_client.cli.local.loading import CompiledModel, load_model
from kiln_client.errors import AlreadyExists, ResourceExhausted
from kiln_client.stack.home import StackRecord

from tests.servers import responses as samples
from tests.servers.scripted_server import ScriptedServer, refusal

MODEL = CompiledModel("tiny", "tiny.auto:v1", samples.DIGEST, num_ranks=1)
OTHER_DIGEST = "sha256:" + "cd" * 32

GIGABYTE = 10**9
NO_CORES = refusal("RESOURCE_EXHAUSTED", "CORES_UNAVAILABLE")


class Silent:
    """Shows no progress."""

    def __getattr__(self, name: str) -> Any:
        return lambda _: None


def deployment(
    deployment_id: str, digest: str, *, ref: str = "", age_s: int = 0, used_slots: int = 0
) -> runtime_pb2.Deployment:
    """A deployment that takes a gigabyte."""
    made = samples.deployment()
    made.roles[0].bundle_ref = ref or f"{deployment_id}.auto:v1"
    made.create_time.FromSeconds(10**9 - age_s)
    made.weights_bytes, made.kv_bytes = GIGABYTE - 1, 1
    made.id = deployment_id
    made.roles[0].bundle_digest = made.roles[0].weights_digest = digest
    made.load.used_slots = used_slots
    return made


async def load(
    server: ScriptedServer,
    *deployments: runtime_pb2.Deployment,
    refusals: Sequence[status_pb2.Status] = (),
    may_replace: bool = True,
) -> runtime_pb2.Deployment:
    server.script("ListDeployments", runtime_pb2.ListDeploymentsResponse(deployments=deployments))
    loaded = runtime_pb2.LoadBundleResponse(deployment=deployment("chosen", samples.DIGEST))
    server.script("LoadBundle", *([status] for status in refusals), [loaded])
    server.script("UnloadBundle", runtime_pb2.UnloadBundleResponse())
    services = StackRecord(0, server.address, server.address, (), is_detached=False)
    return await load_model(services, MODEL, Silent(), may_replace=may_replace, deployment_id="chosen")


@pytest.mark.parametrize(
    ("there", "digest", "loaded", "unloaded"),
    [("tiny", samples.DIGEST, 1, 0), ("chosen", samples.DIGEST, 0, 0), ("chosen", OTHER_DIGEST, 1, 1)],
    ids=["under another id", "under the chosen id", "another bundle that is idle"],
)
async def test_the_bundle_is_loaded_under_the_chosen_id(
    server: ScriptedServer, there: str, digest: str, loaded: int, unloaded: int
) -> None:
    assert (await load(server, deployment(there, digest))).id == "chosen"
    loads = [(request.ref, request.deployment_id) for request in server.requests["LoadBundle"]]
    assert loads == [("tiny.auto:v1", "chosen")] * loaded
    assert [request.deployment_id for request in server.requests["UnloadBundle"]] == ["chosen"] * unloaded


async def test_another_bundle_that_answers_stays(server: ScriptedServer) -> None:
    with pytest.raises(AlreadyExists, match="is not idle"):
        await load(server, deployment("chosen", OTHER_DIGEST, used_slots=1))
    assert server.requests["LoadBundle"] == server.requests["UnloadBundle"] == []


def no_memory(missing_bytes: int) -> status_pb2.Status:
    return refusal("RESOURCE_EXHAUSTED", "MEMORY_UNAVAILABLE", missing_bytes=str(missing_bytes))


@pytest.mark.parametrize("shortage", [NO_CORES, no_memory(2 * GIGABYTE)])
async def test_the_first_loaded_of_idle_checkpoints_makes_room(
    server: ScriptedServer, shortage: status_pb2.Status
) -> None:
    others = [
        deployment("new", OTHER_DIGEST, age_s=1),
        deployment("old", OTHER_DIGEST, age_s=2),
        deployment("answers", OTHER_DIGEST, age_s=3, used_slots=1),
        deployment("bundle", OTHER_DIGEST, age_s=4, ref="bundle:v1"),
    ]
    assert (await load(server, *others, refusals=[shortage])).id == "chosen"
    assert [request.deployment_id for request in server.requests["UnloadBundle"]] == ["old"]
    assert len(server.requests["LoadBundle"]) == 2


@pytest.mark.parametrize(
    ("shortage", "may_replace", "others"),
    [
        (NO_CORES, False, [deployment("old", OTHER_DIGEST)]),
        (NO_CORES, True, [deployment("answers", OTHER_DIGEST, used_slots=1)]),
        (no_memory(GIGABYTE + 1), True, [deployment("old", OTHER_DIGEST)]),
        (refusal("RESOURCE_EXHAUSTED", "QUEUE_FULL"), True, [deployment("old", OTHER_DIGEST)]),
    ],
)
async def test_what_cannot_or_must_not_make_room_stays(
    server: ScriptedServer, shortage: status_pb2.Status, may_replace: bool, others: list[runtime_pb2.Deployment]
) -> None:
    with pytest.raises(ResourceExhausted):
        await load(server, *others, refusals=[shortage], may_replace=may_replace)
    assert server.requests["UnloadBundle"] == []
