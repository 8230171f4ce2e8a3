"""The error of a prompt that takes ranks down.

KilnError
└── RuntimeServiceError
    └── PromptQuarantined
"""

from __future__ import annotations

from runtime_svc.errors import RuntimeServiceError


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
