"""Errors of loads that took the runtime down; see `runtime_svc.deployments.quarantine`.

KilnError
└── RuntimeServiceError
    ├── LoadQuarantined
    └── WeightsQuarantined
"""

from __future__ import annotations

from runtime_svc.errors import RuntimeServiceError


class LoadQuarantined(RuntimeServiceError):
    """A deployment whose load was under way when the runtime died, twice: it is not loaded again by itself."""

    reason = "QUARANTINED"

    def __init__(self, deployment_id: str, ref: str, num_deaths: int) -> None:
        super().__init__(
            f"deployment {deployment_id!r} is quarantined: the runtime died {num_deaths} times while it loaded it, and "
            f"does not load it again by itself; LoadBundle (`kiln load {ref} --deployment {deployment_id}`) tries "
            f"again, UnloadBundle (`kiln unload {deployment_id}`) ends it",
            deployment_id=deployment_id,
            ref=ref,
            num_deaths=num_deaths,
        )


class WeightsQuarantined(RuntimeServiceError):
    """Weights of a followed alias that were being loaded when the runtime died, twice: the old ones serve on."""

    reason = "WEIGHTS_QUARANTINED"

    def __init__(self, deployment_id: str, ref: str, digest: str, num_deaths: int) -> None:
        super().__init__(
            f"they are quarantined: the runtime died {num_deaths} times while it loaded them, and does not load them "
            f"again by itself; move {ref} to another version, or try again by LoadBundle "
            f"(`kiln load {ref} --deployment {deployment_id} --follow-alias`)",
            deployment_id=deployment_id,
            ref=ref,
            digest=digest,
            num_deaths=num_deaths,
        )
