"""The specification of a deployment, and its origin."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Origin(enum.Enum):
    """Who asked for a deployment: a client by LoadBundle, or the deployments file."""

    RPC = "rpc"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class DeploymentSpec:
    """The options of LoadBundle, or of an entry of the deployments file; None takes the runtime's default.

    Attributes:
        cores: One for each rank; empty lets the runtime choose.
        threads_per_core: Threads that each rank computes with.
        follow_alias: Whether the runtime loads new weights whenever the alias in `ref` moves.
        target_inter_token_latency_s: Time between two tokens of a sequence that chunks of prompts are chosen for.
    """

    deployment_id: str
    ref: str
    cores: tuple[int, ...] = ()
    threads_per_core: int | None = None
    follow_alias: bool = False
    target_inter_token_latency_s: float | None = None


@dataclass(frozen=True, slots=True)
class DeploymentDefaults:
    """What the runtime's options say where a specification says nothing.

    Without a target, chunks of prompts are as large as `--max-chunk-tokens` allows.
    """

    threads_per_core: int
    target_inter_token_latency_s: float | None = None
