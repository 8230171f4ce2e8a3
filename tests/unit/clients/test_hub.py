"""Downloads without the distribution that makes them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from kiln_client.cli.local.hub import plan_download
from kiln_client.errors import FailedPrecondition


def test_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FailedPrecondition) as caught:
        plan_download("kiln/tiny", tmp_path, revision=None, token=None)
    assert "kiln-client[hub]" in caught.value.message
