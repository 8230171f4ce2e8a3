"""Loading a model under an id that was chosen before, as a gateway needs it."""

from __future__ import annotations

from typing import Any

import pytest
from kiln.runtime.v1 import runtime_pb2
from kiln_client.errors import AlreadyExists
from kiln_client.local.preparation import CompiledModel, load_model
from kiln_client.stack.home import StackRecord

from tests.servers import responses as samples
from tests.servers.scripted_server import ScriptedServer

MODEL = CompiledModel("tiny", "tiny.auto:v1", samples.DIGEST, num_ranks=1)
OTHER_DIGEST = "sha256:" + "cd" * 32


class Silent:
    """Shows no progress."""

    def __getattr__(self, name: str) -> Any:
        return lambda _: None


def deployment(deployment_id: str, digest: str, *, used_slots: int = 0) -> runtime_pb2.Deployment:
    made = samples.deployment()
    made.id = deployment_id
    made.roles[0].bundle_digest = made.roles[0].weights_digest = digest
    made.load.used_slots = used_slots
    return made


async def load(server: ScriptedServer, *deployments: runtime_pb2.Deployment) -> runtime_pb2.Deployment:
    server.script("ListDeployments", runtime_pb2.ListDeploymentsResponse(deployments=deployments))
    server.script("LoadBundle", [runtime_pb2.LoadBundleResponse(deployment=deployment("chosen", samples.DIGEST))])
    server.script("UnloadBundle", runtime_pb2.UnloadBundleResponse())
    services = StackRecord(0, server.address, server.address, (), is_detached=False)
    return await load_model(services, MODEL, may_replace=True, progress=Silent(), deployment_id="chosen")


async def test_the_bundle_under_another_id_is_loaded_again(server: ScriptedServer) -> None:
    assert (await load(server, deployment("tiny", samples.DIGEST))).id == "chosen"
    (request,) = server.requests["LoadBundle"]
    assert (request.ref, request.deployment_id) == ("tiny.auto:v1", "chosen")


async def test_the_bundle_under_the_chosen_id_is_taken(server: ScriptedServer) -> None:
    assert (await load(server, deployment("chosen", samples.DIGEST))).id == "chosen"
    assert server.requests["LoadBundle"] == []


async def test_another_bundle_makes_room_if_it_is_idle(server: ScriptedServer) -> None:
    assert (await load(server, deployment("chosen", OTHER_DIGEST))).id == "chosen"
    assert [request.deployment_id for request in server.requests["UnloadBundle"]] == ["chosen"]


async def test_another_bundle_that_answers_stays(server: ScriptedServer) -> None:
    with pytest.raises(AlreadyExists, match="is not idle"):
        await load(server, deployment("chosen", OTHER_DIGEST, used_slots=1))
    assert server.requests["LoadBundle"] == server.requests["UnloadBundle"] == []
