"""What an inspection says of a host without the tools of a target."""

from __future__ import annotations

from pathlib import Path

import pytest

from targets import inspection
from targets.inspection import inspect_tools, main
from targets.registry import TARGETS


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = inspect_tools(TARGETS["cpu"])
    assert (found.ok, found.summary) == (False, "no g++ on PATH")
    assert found.advice == "sudo apt-get install --yes g++"


def test_packages_go_into_an_environment_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """This Python's torch is the compiler's, which stays."""
    monkeypatch.delenv("KILN_COMPILER_NEURON_PYTHON", raising=False)
    found = inspect_tools(TARGETS["trn2"])
    assert not found.ok
    assert "it lacks torch-xla, torch-neuronx" in found.summary
    assert found.advice.startswith("python3.11 -m venv .venv-neuron && .venv-neuron/bin/python -m pip install ")
    assert found.advice.endswith("export KILN_COMPILER_NEURON_PYTHON=$PWD/.venv-neuron/bin/python")


def test_a_host_whose_glibc_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection.platform, "libc_ver", lambda: ("glibc", "2.34"))
    found = inspect_tools(TARGETS["trn2"])
    assert (found.ok, found.summary) == (False, "glibc 2.34, needed 2.35: torch-neuronx cannot be imported")
    assert "Ubuntu 24.04" in found.advice


def test_a_target_that_there_is_not() -> None:
    with pytest.raises(SystemExit, match="target: got 'trn9'; accepted: cpu, inf2"):
        main("trn9")
