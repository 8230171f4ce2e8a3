"""`kiln errors` lists reasons and explains them, without a server."""

from __future__ import annotations

import pytest

from tests.service.clients.conftest import Kiln


def test_reasons_are_listed_with_their_codes(kiln: Kiln) -> None:
    lines = [line.split(maxsplit=1) for line in kiln("errors").out.splitlines()]
    assert ["DEVICE_BUSY", "INTERNAL compiler, UNAVAILABLE runtime"] in lines
    assert ["STATE_IN_USE", "ends the process runtime"] in lines
    assert ["HOME_IN_USE", "FAILED_PRECONDITION client"] in lines


@pytest.mark.parametrize(
    ("reason", "texts"),
    [
        ("QUEUE_FULL", ["RESOURCE_EXHAUSTED runtime", "as many requests as it may", "try again", "capacity"]),
        ("NAME_INVALID", ["not a bundle name", "correct what the error names", "name"]),
        ("TOKEN_EXPIRED", ["UNAUTHENTICATED", "time is over", "--token-file"]),
        ("EXECUTABLES_MISSING", ["FAILED_PRECONDITION compiler", "FAILED_PRECONDITION runtime"]),
    ],
)
def test_a_reason_is_explained(kiln: Kiln, reason: str, texts: list[str]) -> None:
    out = kiln("errors", reason).out
    assert [text for text in texts if text not in out] == []


def test_a_reason_that_does_not_exist(kiln: Kiln) -> None:
    outcome = kiln("errors", "NO_SUCH", "--json")
    assert outcome.exit_code == 2
    assert "got 'NO_SUCH'" in outcome.error["message"]
