"""A share of the tests with the newest release of everything but torch, beyond our ranges and constraints."""

from __future__ import annotations

import subprocess
import tomllib
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.architecture.test_constraints import OURS, TORCH, read_constraints, read_requirements
from tests.repository import ROOT

#: What starts nothing, what depends on how libraries convert, and a compile, a load and an answer at both levels.
SHARE = (
    "tests/unit",
    "tests/service/compiler_svc/builds/test_tokenizer_stage.py",
    "tests/system/clients/test_run.py",
    "tests/system/deploy/test_wheels.py",
)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with the newest releases."""
    folder = tmp_path_factory.mktemp("newest")
    venv.create(folder, with_pip=True)
    python, constraints = folder / "bin/python", folder / "torch.txt"
    _run(ROOT / "deploy/install-torch", python, "--quiet", "--no-compile")
    constraints.write_text(f"torch=={_list_releases(python)[TORCH]}\n")
    names = {_drop_range(one) for folder in OURS for one in read_requirements(folder) if one.name != TORCH}
    group = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["dev"]
    names |= {name for name in group if "==" not in name}  # those made code that is committed
    pip = (python, "-m", "pip", "install", "--quiet", "--no-compile")
    _run(*pip, "--upgrade", "--upgrade-strategy", "eager", "--constraint", constraints, "pip", *sorted(names))
    own = [word for folder in OURS for word in ("--editable", ROOT / folder)]
    _run(*pip, "--no-deps", "--no-build-isolation", *own)
    return python


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True)


def _drop_range(requirement: Requirement) -> str:
    extras = f"[{','.join(requirement.extras)}]" if requirement.extras else ""
    return f"{requirement.name}{extras}"


def _list_releases(python: Path) -> dict[str, str]:
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    return {canonicalize_name(one.name): one.version for one in metadata.distributions(path=[str(packages)])}


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_newest_releases_break_nothing(python: Path) -> None:
    constrained = read_constraints()
    newer = [
        f"{name} {constrained[name]} -> {release}"
        for name, release in _list_releases(python).items()
        if name in constrained and release != constrained[name]
    ]
    command = [python, "-m", "pytest", "-q", "-m", "not slow", "--numprocesses", "2", "--dist", "loadfile", *SHARE]
    result = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    failed = [line for line in result.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    assert result.returncode == 0, "\n".join(["broken by one of", *newer, *failed, *result.stdout.splitlines()[-30:]])
