"""The benchmark of quantized weights and caches, with tiny models and the peers that are installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.peers import find_missing
from bench.plan import QUICK_FORMATS
from bench.worker import ROOT

pytestmark = [pytest.mark.toolchain, pytest.mark.timeout(1800)]


@pytest.mark.slow
def test_every_format_is_measured(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    command = [sys.executable, "-m", "bench", "--formats", "--quick", "--output", str(page)]
    said = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    missing = find_missing(QUICK_FORMATS[0].peers)
    assert said.split("writing the checkpoint", 1)[0].count("is left out") == len(missing)
    sections = page.read_text().split("\n## ")[1:]
    assert len(sections) == len(QUICK_FORMATS)
    for workload, section in zip(QUICK_FORMATS, sections, strict=True):
        failed = section.partition("### Failed")[2].partition("###")[0]
        assert failed.count("\n| ") == failed.count("not installed, ") + 2 * bool(failed), failed
        figures = len(workload.batches) + len(workload.prompts)
        engines = len(workload.bare_engines) + len(workload.peers.keys() - missing)
        assert section.count("ms (") == engines * figures
