"""What a client may choose for a sequence that it does not read."""

from __future__ import annotations

import pytest

from runtime_svc.admission.stalls import StallCall
from runtime_svc.engine.request import StallAction, StallPolicy, StallTimeouts

ABORT, PAUSE, COALESCE = StallAction
TIMEOUTS = StallTimeouts(30.0, 300.0)


@pytest.mark.parametrize(
    ("call", "policy"),
    [
        (StallCall(ABORT), StallPolicy(ABORT, 30.0)),
        (StallCall(ABORT, 1.0), StallPolicy(ABORT, 1.0)),
        (StallCall(PAUSE), StallPolicy(PAUSE, 300.0)),
        (StallCall(PAUSE, 45.5), StallPolicy(PAUSE, 45.5)),
        (StallCall(COALESCE, 300.0), StallPolicy(COALESCE, 300.0)),
    ],
)
def test_choices_within_the_bounds(call: StallCall, policy: StallPolicy) -> None:
    assert not [*call.find_violations(TIMEOUTS, wants_logits=False)]
    assert call.resolve(TIMEOUTS) == policy


@pytest.mark.parametrize(
    ("call", "field", "accepted"),
    [
        (StallCall(9), "stall_policy.action", "ABORT, PAUSE or COALESCE"),
        (StallCall(ABORT, 30.5), "stall_policy.timeout", "1 s to 30 s"),
        (StallCall(PAUSE, 301.0), "stall_policy.timeout", "1 s to 300 s"),
        (StallCall(COALESCE, 0.0), "stall_policy.timeout", "1 s to 300 s"),
        (StallCall(ABORT, -1.0), "stall_policy.timeout", "1 s to 30 s"),
    ],
)
def test_choices_beyond_them(call: StallCall, field: str, accepted: str) -> None:
    (violation,) = call.find_violations(TIMEOUTS, wants_logits=False)
    assert (violation.field, violation.accepted) == (field, accepted)


@pytest.mark.parametrize("action", [PAUSE, COALESCE])
def test_logits_are_kept_for_no_client_that_stays_away(action: StallAction) -> None:
    (violation,) = StallCall(action).find_violations(TIMEOUTS, wants_logits=True)
    assert violation.value == action.name
    assert not [*StallCall(ABORT).find_violations(TIMEOUTS, wants_logits=True)]


def test_a_server_with_a_short_timeout_takes_it() -> None:
    assert not [*StallCall(ABORT, 0.2).find_violations(StallTimeouts(0.2, 300.0), wants_logits=False)]
