"""The client's choice of what becomes of its sequence while it does not read, and the server's bounds on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from bundle.errors import FieldViolation
from runtime_svc.engine.request import StallAction, StallPolicy, StallTimeouts

#: The shortest timeout, unless the server's own is shorter: a client that reads may be late by that much.
MIN_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class StallCall:
    """A stall policy as the client sent it; actions that this code does not know are numbers, and None means unset."""

    action: StallAction | int
    timeout_s: float | None = None

    def find_violations(self, timeouts: StallTimeouts, *, wants_logits: bool) -> Iterator[FieldViolation]:
        """Yields what is wrong with it, for a request that may want all logits of its tokens."""
        if not isinstance(self.action, StallAction):
            yield FieldViolation("stall_policy.action", str(self.action), "ABORT, PAUSE or COALESCE")
            return
        if wants_logits and self.action is not StallAction.ABORT:
            yield FieldViolation("stall_policy.action", self.action.name, "ABORT, beside output.logits")
        least_s, most_s = min(MIN_TIMEOUT_S, timeouts.default_s), _find_bound(self.action, timeouts)
        if self.timeout_s is not None and not least_s <= self.timeout_s <= most_s:
            accepted = f"{least_s:g} s to {most_s:g} s"
            yield FieldViolation("stall_policy.timeout", f"{self.timeout_s:g} s", accepted)

    def resolve(self, timeouts: StallTimeouts) -> StallPolicy:
        """Returns the policy in force. The call has no violations."""
        assert isinstance(self.action, StallAction)
        bound_s = _find_bound(self.action, timeouts)
        return StallPolicy(self.action, bound_s if self.timeout_s is None else self.timeout_s)


def _find_bound(action: StallAction, timeouts: StallTimeouts) -> float:
    return timeouts.default_s if action is StallAction.ABORT else timeouts.max_s
