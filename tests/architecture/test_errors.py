"""`kiln errors` says what the code does, and the protos name only errors that exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from bundle.errors import KilnError
from tests.architecture.error_table import PACKAGES, error_classes, make_error
from tests.repository import ROOT

#: What ends a process that is to serve, or to sign tokens.
UNTOLD = {
    "ADDRESS_INVALID",
    "ADDRESS_UNAVAILABLE",
    "ANONYMOUS_REFUSED",
    "DATABASE_SCHEMA_UNSUPPORTED",
    "DATABASE_UNAVAILABLE",
    "DEPLOYMENTS_FILE_INVALID",
    "IDENTITIES_INVALID",
    "JWKS_INVALID",
    "LOG_FILE_INVALID",
    "OPTIONS_INVALID",
    "PLAINTEXT_REFUSED",
    "SIGNING_KEY_INVALID",
    "STATE_INVALID",
    "STATE_IN_USE",
    "STORE_LOCKED",
    "TLS_FILE_INVALID",
    "TRACING_UNAVAILABLE",
}
#: How many errors of one package share a reason.
SHARED = {("compiler_svc", "FEATURE_NOT_SERVED"): 3}


def test_every_other_error_has_a_code() -> None:
    assert {error.reason for error in error_classes() if error.code is None} == UNTOLD


@pytest.mark.parametrize("error", error_classes(), ids=lambda error: error.__name__)
def test_every_error_can_be_made(error: type[KilnError]) -> None:
    made = make_error(error)
    assert str(made)
    assert re.fullmatch(r"[A-Z][A-Z0-9_]{1,62}", error.reason)


@pytest.mark.parametrize(("service", "other"), [("compiler_svc", "runtime_svc"), ("runtime_svc", "compiler_svc")])
def test_a_service_knows_every_error_that_its_children_may_send(service: str, other: str) -> None:
    """`Failure.to_error` makes an error of a class that its process has not imported a plain one, without a code."""
    knows = f"import sys, {service}.__main__; print(*sys.modules)"
    known = subprocess.run([sys.executable, "-c", knows], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    sent = {error.__module__ for error in error_classes() if not error.__module__.startswith(f"{other}.")}
    assert len(sent) > 8
    assert sent - {*known.split()} == set()


def test_reasons_tell_the_errors_of_a_package_apart() -> None:
    reasons = Counter((error.__module__.partition(".")[0], error.reason) for error in error_classes())
    assert {key: number for key, number in reasons.items() if number > 1} == SHARED


def test_reasons_of_the_protos_exist() -> None:
    known = {error.reason for error in error_classes()}
    text = "".join(path.read_text() for path in (ROOT / "protos/kiln").rglob("*.proto"))
    named = set(re.findall(r"\b[A-Z_]+/([A-Z][A-Z_]+)\b", text))
    assert len(named) > 20
    assert named <= known


def test_every_error_is_raised_somewhere() -> None:
    """A reason that no code gives explains nothing."""
    sources = [path for package in PACKAGES for path in Path(package.__path__[0]).rglob("*.py")]
    words = Counter(word for path in sources for word in set(re.findall(r"\w+", path.read_text())))
    assert [error.__name__ for error in error_classes() if words[error.__name__] < 2] == []


def test_reasons_of_the_client_are_its_table() -> None:
    client = ROOT / "clients/python/kiln_client"
    stated = re.findall(r'reason="([A-Z_]+)"', "".join(path.read_text() for path in client.rglob("*.py")))
    table = json.loads((client / "cli/client_errors.json").read_text())
    # An error that gives no reason has its code as one.
    assert {row["reason"] for row in table} == {*stated, "DEADLINE_EXCEEDED"}
