"""Fixtures that tests of several packages have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.servers.authority import Authority
from tests.servers.key_issuer import Issuer


@pytest.fixture
def issuer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Issuer]:
    """Serves public keys at an https URL of an authority that this process trusts."""
    authority = Authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
    with closing(Issuer(authority)) as started:
        yield started
