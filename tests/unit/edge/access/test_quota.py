import pytest

from edge.access.errors import PrincipalBusy
from edge.access.principal import ANONYMOUS, Principal
from edge.access.quota import PrincipalQuota

ALICE, BOB = Principal("alice", frozenset()), Principal("bob", frozenset())


def test_each_principal_has_its_own_bound() -> None:
    quota = PrincipalQuota("streams", 2, retry_after_s=3)
    with quota.hold(ALICE), quota.hold(ALICE), quota.hold(BOB):
        with pytest.raises(PrincipalBusy) as caught, quota.hold(ALICE):
            pass
        assert caught.value.metadata == {"principal": "alice", "what": "streams", "limit": "2"}
        assert caught.value.retry_after_s == 3
        with quota.hold(BOB):
            pass
    with quota.hold(ALICE), quota.hold(ALICE):
        pass
    assert not quota._held, "what is given back is forgotten"


def test_callers_without_a_name_share_no_bound() -> None:
    quota = PrincipalQuota("streams", 1, retry_after_s=1)
    with quota.hold(ANONYMOUS), quota.hold(ANONYMOUS):
        pass
