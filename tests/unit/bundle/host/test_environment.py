"""What each kind of process inherits of a service's environment."""

from __future__ import annotations

import os
from typing import get_args

import pytest

from bundle.host.environment import INHERITED, Kind, inherit

CREDENTIALS = {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "KILN_TOKEN", "KILN_COMPILER_DATABASE", "PIP_INDEX_URL"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    others = ("PATH", "LC_ALL", "OMP_NUM_THREADS", "SSL_CERT_FILE", "NEURON_RT_LOG_LEVEL", "https_proxy", "CXX")
    for name in (*others, "KILN_COMPILER_NEURON_PYTHON", *CREDENTIALS):
        monkeypatch.setenv(name, f"value of {name}")


@pytest.mark.parametrize("kind", get_args(Kind))
def test_credentials_are_for_fetches(kind: Kind) -> None:
    found = inherit(kind)
    assert found.items() <= os.environ.items()
    assert {"PATH", "LC_ALL", "OMP_NUM_THREADS", "SSL_CERT_FILE"} <= found.keys()
    remote = {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY"} if kind == "fetch" else set()
    assert CREDENTIALS & found.keys() == remote
    assert ("https_proxy" in found) == (kind == "fetch")


def test_neurons_variables_are_for_what_computes() -> None:
    assert INHERITED.keys() == set(get_args(Kind))
    neuron = {kind for kind in INHERITED if "NEURON_RT_LOG_LEVEL" in inherit(kind)}
    assert neuron == {"rank", "neuron interpreter", "plan", "build"}
    assert {kind for kind in INHERITED if "KILN_COMPILER_NEURON_PYTHON" in inherit(kind)} == {"plan", "build"}
    assert {kind for kind in INHERITED if "CXX" in inherit(kind)} == {"build"}
