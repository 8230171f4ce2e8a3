import platform
from pathlib import Path

import pytest
import torch

from targets.cpu import CPU, GXX
from targets.errors import ToolchainMissing

ASIS, COMPILED, FUSED = (lowering.toolchain for lowering in CPU.lowerings)


def test_level_0_names_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ASIS.read_versions() == {"python": platform.python_version(), "torch": torch.__version__}
    ASIS.require_programs()


def test_the_compilers_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 12.2.0\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert GXX.find() == compiler
    assert COMPILED.read_versions() == FUSED.read_versions() == ASIS.read_versions() | {"g++": "12.2.0"}


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for ask in (COMPILED.read_versions, COMPILED.require_programs):
        with pytest.raises(ToolchainMissing, match=r"no g\+\+ on PATH: install it, or compile with .* level 0"):
            ask()
