"""lm-evaluation-harness finds of a deployment what it finds of the checkpoint in transformers."""

from __future__ import annotations

import json
import os
import site
import subprocess
import venv
from pathlib import Path
from typing import Final

import pytest

from tests.repository import ROOT
from tests.servers.command import python_environment
from tests.servers.stack import Stack
from tests.system.clients.hf.conftest import MODEL

#: Beside them, it has what the Python of the tests has.
PACKAGES: Final = ("lm_eval==0.4.13", "accelerate")


@pytest.fixture(scope="module")
def harness() -> Path:
    """A Python that has the harness; downloads 150 MB once."""
    folder = ROOT / "build/evaluation"
    python, marker = folder / "bin/python", folder / ".installed"
    if not marker.exists():
        venv.create(folder, with_pip=True, clear=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "shared.pth").write_text("\n".join(site.getsitepackages()))
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True, timeout=600)
        marker.touch()
    return python


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_figures_are_those_of_transformers(harness: Path, stack: Stack, deployment: str, tmp_path: Path) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    script = Path(__file__).with_name("evaluation.py")
    result = subprocess.run(
        [harness, script, MODEL, deployment, stack.runtime, stack.token, tmp_path],
        env=os.environ | python_environment() | offline,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    served, reference = (json.loads(line) for line in result.stdout.splitlines() if line.startswith('{"figures"'))
    assert served["figures"] == pytest.approx(reference["figures"], rel=1e-4)
    assert len(served["figures"]) == 5
    assert served["figures"]["choice.acc,none"] == 1
    assert served["answers"]["tale"] == reference["answers"]["tale"]
    for task in ("choice", "words"):
        assert len(served["answers"][task]) == 5
        for ours, theirs in zip(served["answers"][task], reference["answers"][task], strict=True):
            assert json.dumps(ours).count("false") == json.dumps(theirs).count("false")
