"""What an installed SDK is to a script elsewhere: importable whatever lies beside the script, and typed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import kiln
from kiln.runtime.v1 import runtime_pb2
from kiln_client import Runtime

runtime: type[Runtime] = Runtime
role: runtime_pb2.Role.ValueType = runtime_pb2.ROLE_TARGET
print(kiln.__file__)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def run(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [sys.executable, *words], env=environment, cwd=cwd, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("beside", [(), ("kiln", "kiln/runtime/v1", "kiln_client")], ids=["alone", "beside a clone"])
def test_directories_beside_a_script_shadow_nothing(script: Path, beside: tuple[str, ...]) -> None:
    for name in beside:
        (script.parent / name).mkdir(parents=True)
    result = run(script, cwd=script.parent)
    assert result.stderr == ""
    assert Path(result.stdout.strip()).name == "__init__.py"


def test_a_type_checker_finds_client_and_stubs(script: Path, tmp_path: Path) -> None:
    options = ("--strict", "--follow-imports", "skip", "--cache-dir", tmp_path / "cache")
    result = run("-m", "mypy", *options, script, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "Success: no issues found in 1 source file\n")
