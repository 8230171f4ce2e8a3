"""Errors of adapters; and of state and declared deployments, which end the process before it serves."""

from __future__ import annotations

from collections.abc import Sequence

from bundle.errors import FieldViolation, KilnError, Unsaid
from runtime_svc.errors import RuntimeServiceError


class StartupError(KilnError, reason="STARTUP_FAILED"):
    """Root of the errors that end the process before it serves."""


class StateInUse(StartupError):
    """A state directory that another runtime holds."""

    message = "another runtime uses the state directory {path}"
    path: str


class StateInvalid(StartupError):
    """A state directory that cannot be opened or read."""

    message = "the state at {path} cannot be read: {detail}"
    path: str
    detail: str


class DeploymentsFileInvalid(StartupError):
    """A deployments file that cannot be read, or that has an invalid entry."""

    message = "{path}: {violations}"
    path: str
    violations: Sequence[FieldViolation]


class AdaptersUnsupported(RuntimeServiceError, code="FAILED_PRECONDITION"):
    """Executables without room for adapters."""

    message = (
        "the executables of deployment {deployment_id!r} have no room for adapters: compile them with "
        "neuron_config.lora_config"
    )
    deployment_id: str


class AdapterMissing(RuntimeServiceError, code="FAILED_PRECONDITION"):
    """A bundle that is not one adapter, and nothing else."""

    message = "{ref} has {holds}; accepted: a bundle of one adapter, as ShardAdapter (`kiln adapters shard`) makes it"
    ref: str
    holds: str


class AdapterNotFound(RuntimeServiceError, code="NOT_FOUND"):
    """A name that means no adapter to the caller: other principals' adapters are as if they were not there."""

    violation = FieldViolation("{field}", "{name!r}", "{accepted}")
    deployment_id: str
    field: str
    name: str
    accepted: Unsaid[str]


class AdapterExists(RuntimeServiceError, code="ALREADY_EXISTS"):
    """A name of the caller's that means another adapter."""

    message = "the caller's adapter {name!r} is {digest}, not {offered}; with `replace` it becomes the other one"
    name: str
    digest: str
    offered: str


class TooManyAdapters(RuntimeServiceError, code="RESOURCE_EXHAUSTED"):
    """One more adapter, while the caller or the deployment has as many as it may."""

    message = "a {bounded} has at most {limit} adapters; UnloadAdapter (`kiln adapters unload`) makes room"
    bounded: str
    limit: int
