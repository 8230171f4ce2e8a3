"""Errors of what is not repeated because it took processes down.

Loads: see `runtime_svc.deployments.quarantine`. Prompts: see `runtime_svc.engine.suspects`.

KilnError
└── RuntimeServiceError
    ├── LoadQuarantined
    ├── PromptQuarantined
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


class PromptQuarantined(RuntimeServiceError):
    """A prompt over which ranks died, hung or failed twice, the last time over it alone."""

    reason = "PROMPT_QUARANTINED"

    def __init__(self, digest: str, num_losses: int, expires_in_s: float) -> None:
        super().__init__(
            f"the ranks were lost {num_losses} times while they computed this prompt, the last time while they "
            f"computed nothing else, so it is refused for {expires_in_s:.0f} s; unloading and loading the deployment, "
            f"or loading other weights, ends that sooner",
            digest=digest,
            num_losses=num_losses,
            expires_in_s=f"{expires_in_s:.0f}",
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
