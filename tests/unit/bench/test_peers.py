"""Which peers a run leaves out."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import bench.__main__ as command
from bench.measurements import Measurements
from bench.peers import PEERS, find_missing
from bench.plan import QUICK_FORMATS, Workload
from bench.report import Section
from bench.run import say


@pytest.fixture
def absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A peer whose environment does not exist."""
    monkeypatch.setitem(PEERS, "llama_cpp", replace(PEERS["llama_cpp"], environment=tmp_path / "none"))
    return "llama_cpp"


def test_a_missing_peer_is_named_with_what_it_lacks_and_how_to_install_it(absent: str) -> None:
    assert find_missing([absent]) == {absent: "not installed, llama_cpp, gguf missing: `python -m bench.peers.install`"}


def test_a_run_says_at_its_start_which_peers_are_missing(
    absent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(workload: Workload, peers: list[str], missing: dict[str, str]) -> Section:
        say(f"measuring {workload.name} beside {peers} without {list(missing)}")
        return Section(workload, Measurements(), 1, 1)

    monkeypatch.setattr(command, "measure", measure)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    page = tmp_path / "page.md"
    words = ["--formats", "--quick", "--peers", absent, "--output", str(page)]
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    command.main()
    said = capsys.readouterr().out.splitlines()
    assert "llama.cpp is left out: not installed, llama_cpp, gguf missing" in said[0]
    assert said[1].endswith(f"tiny-int8 beside ['{absent}'] without ['{absent}']")
    assert page.read_text().count("\n## ") == len(QUICK_FORMATS)
