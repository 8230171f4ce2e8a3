"""Fixtures that tests of several packages have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from tests.servers.authority import Authority
from tests.servers.key_issuer import Issuer
from tests.servers.logs import Logs


@pytest.fixture
def issuer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Issuer]:
    """Serves public keys at an https URL of an authority that this process trusts."""
    authority = Authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
    with closing(Issuer(authority)) as started:
        yield started


@pytest.fixture
def logs() -> Iterator[Logs]:
    """What is logged, with what the call's context binds."""
    with capture_logs(processors=[structlog.contextvars.merge_contextvars]) as captured:
        yield captured
