"""What a deployment was asked for, and by whom."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Origin(enum.Enum):
    """Who asked for a deployment, and so who may end it."""

    RPC = "rpc"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class DeploymentSpec:
    """What LoadBundle, or an entry of the deployments file, asks for.

    Attributes:
        deployment_id: Id of the deployment.
        ref: Bundle reference.
        cores: Cores to use, one a rank; empty lets the runtime place it.
        threads_per_core: Threads that each rank computes with; None takes the runtime's default.
        follow_alias: Load the weights that the alias of `ref` names whenever it moves.
    """

    deployment_id: str
    ref: str
    cores: tuple[int, ...] = ()
    threads_per_core: int | None = None
    follow_alias: bool = False
