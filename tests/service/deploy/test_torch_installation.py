"""deploy/install-torch against indexes on disk: always the CPU build, wherever it is, and never CUDA."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
import venv
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from tests.repository import ROOT

SCRIPT = ROOT / "deploy/install-torch"
VERSION = "2.13.0"

Install = Callable[..., subprocess.CompletedProcess[str]]


def write_wheel(folder: Path, name: str, version: str, *requirements: str) -> None:
    """Writes a wheel without code into an index."""
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    information = f"{name}-{version}.dist-info"
    metadata = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {wanted}" for wanted in requirements)]
    with zipfile.ZipFile(place / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{information}/METADATA", "\n".join(["Metadata-Version: 2.1", *metadata, ""]))
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", "")
    links = "".join(f'<a href="{file.name}">{file.name}</a>' for file in place.glob("*.whl"))
    (place / "index.html").write_text(f"<html><body>{links}</body></html>")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    return folder / "bin/python"


@pytest.fixture
def default_index(tmp_path: Path) -> Path:
    """What PyPI has: a build that brings CUDA."""
    index = tmp_path / "default"
    write_wheel(index, "torch", VERSION, "cuda-toolkit")
    write_wheel(index, "cuda_toolkit", "13.0.3")
    (index / "cuda_toolkit").rename(index / "cuda-toolkit")
    return index


@pytest.fixture
def cpu_index(tmp_path: Path) -> Path:
    index = tmp_path / "cpu"
    write_wheel(index, "torch", f"{VERSION}+cpu")
    return index


@pytest.fixture
def install(python: Path, default_index: Path, tmp_path: Path) -> Install:
    for one in distributions(python):
        shutil.rmtree(str(one.locate_file(f"{one.name}-{one.version}.dist-info")))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    environment = inherited | {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": default_index.as_uri()}

    def run(cpu_index: Path = tmp_path / "nowhere") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [SCRIPT, python, "--no-compile"],
            env=environment | {"TORCH_INDEX": cpu_index.as_uri()},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def distributions(python: Path) -> list[metadata.Distribution]:
    (folder,) = python.parents[1].glob("lib/python*/site-packages")
    found = metadata.distributions(path=[str(folder)])
    return [one for one in found if one.name not in ("pip", "setuptools")]


def installed(python: Path) -> dict[str, str]:
    return {one.name: one.version for one in distributions(python)}


@pytest.mark.slow
def test_the_index_of_cpu_builds_is_the_second_choice(install: Install, python: Path, cpu_index: Path) -> None:
    outcome = install(cpu_index)
    assert outcome.returncode == 0, outcome.stderr
    assert installed(python) == {"torch": f"{VERSION}+cpu"}
    assert cpu_index.as_uri() in outcome.stderr


def test_pips_own_index_is_the_first_choice(install: Install, python: Path, default_index: Path) -> None:
    write_wheel(default_index, "torch", f"{VERSION}+cpu")
    assert install().returncode == 0
    assert installed(python) == {"torch": f"{VERSION}+cpu"}


def test_without_a_cpu_build_nothing_is_installed(install: Install, python: Path) -> None:
    outcome = install()
    assert outcome.returncode != 0
    assert f"torch=={VERSION}+cpu" in outcome.stderr
    assert installed(python) == {}


def test_a_torch_of_this_version_stays(install: Install, python: Path, default_index: Path) -> None:
    write_wheel(default_index, "torch", f"{VERSION}+ours")
    command = [python, "-m", "pip", "install", "--no-index", "--find-links", default_index / "torch"]
    subprocess.run([*command, f"torch=={VERSION}+ours"], check=True, capture_output=True)
    assert install().returncode == 0
    assert installed(python) == {"torch": f"{VERSION}+ours"}


@pytest.mark.parametrize("folder", ["execution", "compiler_svc"])
def test_the_version_is_the_one_that_the_services_need(folder: str) -> None:
    needed = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch=={VERSION}" in needed
    assert f"version={VERSION}\n" in SCRIPT.read_text()


@pytest.mark.parametrize("path", ["Makefile", "deploy/compiler.Dockerfile", "deploy/runtime.Dockerfile"])
def test_nothing_else_installs_torch(path: str) -> None:
    text = (ROOT / path).read_text()
    assert re.search(r"install-torch \S+/python", text)
    assert "torch==" not in text
