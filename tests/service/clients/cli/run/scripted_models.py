"""What a script answers for services that have a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kiln.runtime.v1 import runtime_pb2
from kiln_client.stack.home import StackRecord

from tests.servers import responses as samples
from tests.servers.scripted_server import ScriptedServer

GIB = 1 << 30
OTHER_DIGEST = "sha256:" + "cd" * 32


def record(server: ScriptedServer, home: Path, *, is_detached: bool) -> StackRecord:
    return StackRecord(0, server.address, server.address, (str(home / "models"),), is_detached)


def deployment(deployment_id: str = "tiny", digest: str = samples.DIGEST, **load: int) -> runtime_pb2.Deployment:
    """A deployment that chats."""
    made = samples.deployment()
    made.id = deployment_id
    made.capabilities.chat = True
    made.roles[0].bundle_digest = made.roles[0].weights_digest = digest
    made.load.MergeFrom(runtime_pb2.Load(**load))  # type: ignore[arg-type]
    return made


def script_deployments(server: ScriptedServer, *deployments: runtime_pb2.Deployment) -> None:
    server.script("ListDeployments", runtime_pb2.ListDeploymentsResponse(deployments=deployments))


def asked(server: ScriptedServer) -> list[list[tuple[str, str]]]:
    """Turns of each conversation that the runtime was asked to answer."""
    return [[(turn.role, turn.content) for turn in one.chat.messages] for one in server.requests["Generate"]]


def compiled(server: ScriptedServer) -> Any:
    """The configuration that the compiler was asked for."""
    (request,) = server.requests["Compile"]
    return json.loads(request.config_json)
