import platform
from pathlib import Path

import pytest
import torch

from compiler_svc.lower.errors import ToolchainMissing
from compiler_svc.lower.toolchain import find_compiler, toolchain


def test_level_0_names_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert toolchain(0) == {"python": platform.python_version(), "torch": torch.__version__}


def test_the_compilers_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 12.2.0\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_compiler() == compiler
    assert toolchain(1) == toolchain(0) | {"g++": "12.2.0"}


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainMissing, match=r"no g\+\+ on PATH: install it, or compile with optimization level 0"):
        toolchain(1)
