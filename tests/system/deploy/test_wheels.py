"""Both services as `pip install` of their wheels leaves them, on a host without the checkout."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.test_constraints import OURS
from tests.repository import ROOT

#: One bucket, and no code to compile: tests/architecture shows that wheels have the sources of kernels.
_OVERRIDES = ("seq_len=64", "batch_size=1", "torch_dtype=float32")
_SMALL = ("-O", "0", *(word for one in _OVERRIDES for word in ("--override", f"neuron_config.{one}")))
_MODULES = ("kiln", "bundle", "targets", "edge", "execution", "compiler_svc", "runtime_svc", "kiln_client")
_ANSWER = ("--max-new-tokens", "4", "--temperature", "0")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Programs of an environment with our wheels, and with the packages of others that this one has."""
    sources = [_copy_sources(folder, tmp_path / "sources" / folder) for folder in OURS]
    environment, wheels = tmp_path / "environment", tmp_path / "wheels"
    _pip("wheel", "--no-build-isolation", "--wheel-dir", wheels, *sources)
    venv.create(environment)
    _pip("--python", environment, "install", "--no-compile", *wheels.iterdir())
    # Python reads no path file there, so that what is installed there as editable, ours, is not found.
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    return environment / "bin"


def _copy_sources(folder: str, copy: Path) -> Path:
    """Copies what git has of a distribution: setuptools would pack what an earlier build has left beside it."""
    listed = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(listed, cwd=ROOT / folder, check=True, capture_output=True, text=True).stdout.splitlines()
    for name in names:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / folder / name, copy / name)
    return copy


def _pip(*words: str | Path) -> None:
    command = [sys.executable, "-m", "pip", *words, "--quiet", "--no-deps", "--no-index"]
    subprocess.run(command, check=True)


@pytest.fixture
def home(installed: Path, tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "home"
    yield path
    subprocess.run([installed / "kiln", "down", "--home", path], check=True, stdout=subprocess.DEVNULL)


def test_what_is_installed_compiles_loads_and_generates(installed: Path, home: Path, tmp_path: Path) -> None:
    program = f"import {', '.join(_MODULES)}; print(*(one.__file__ for one in ({', '.join(_MODULES)})))"
    found = subprocess.run(
        [installed / "python", "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert [path for path in found.stdout.split() if not Path(path).is_relative_to(installed.parent)] == []
    model = ROOT / "examples/models/kiln-tiny"
    command = [installed / "kiln", "run", model, "Once upon a time", *_SMALL, *_ANSWER, "--home", home, "--json"]
    result = subprocess.run(
        command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.returncode == 0, (events[-1:], result.stderr)
    assert events[-1]["usage"]["generated_tokens"] == 4
