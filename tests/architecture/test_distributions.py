"""Every package of the tree belongs to exactly one distribution, which states its licence."""

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest

from tests.repository import ROOT

IN_PLACE = ["bundle", "targets", "edge", "execution", "compiler_svc", "runtime_svc"]
PYTHON = ["protos", *IN_PLACE, "clients/python"]
LICENSE_FILES = ["LICENSE", "NOTICE"]


@pytest.mark.parametrize("folder", IN_PLACE)
def test_distribution_lists_every_package(folder: str) -> None:
    listed = _list_packages(folder)
    found = {".".join(init.parent.relative_to(ROOT).parts) for init in (ROOT / folder).rglob("__init__.py")}
    with_modules = {
        ".".join(module.parent.relative_to(ROOT).parts)
        for module in (ROOT / folder).rglob("*.py")
        if "build" not in module.parts and module.name != "setup.py"
    }
    assert listed == found == with_modules


def _list_packages(folder: str) -> set[str]:
    """What the distribution's files list; `setup.py` lists every folder with an `__init__.py`."""
    setuptools_table = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["tool"]["setuptools"]
    if "packages" in setuptools_table:
        return set(setuptools_table["packages"])
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base"]
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run([*command, directory], cwd=ROOT / folder, check=True, capture_output=True)
        (sources,) = Path(directory).glob("*/SOURCES.txt")
        return {
            ".".join((folder, *Path(line).parent.parts))
            for line in sources.read_text().splitlines()
            if line.endswith("__init__.py")
        }


@pytest.mark.parametrize("folder", IN_PLACE)
def test_package_says_what_it_does(folder: str) -> None:
    for init in (ROOT / folder).rglob("__init__.py"):
        assert init.read_text().startswith('"""'), f"{init.relative_to(ROOT)} has no docstring"


def test_files_stay_small() -> None:
    sources = [path for folder in [*IN_PLACE, "clients/python"] for path in (ROOT / folder).rglob("*.py")]
    long = {
        str(path.relative_to(ROOT)): lines for path in sources if (lines := len(path.read_text().splitlines())) > 400
    }
    assert long == {}


def test_no_distribution_is_left_out() -> None:
    found = {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("*/pyproject.toml")}
    found |= {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("clients/*/pyproject.toml")}
    assert found == set(PYTHON)


@pytest.mark.parametrize("folder", PYTHON)
def test_distribution_states_its_licence(folder: str) -> None:
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert project["license-files"] == LICENSE_FILES


def test_typescript_package_states_its_licence() -> None:
    package = json.loads((ROOT / "clients/typescript/package.json").read_text())
    assert package["license"] == "Apache-2.0"
    assert "NOTICE" in package["files"], "npm packs LICENSE by itself, and NOTICE only when it is listed"


# Each distribution is built from its own folder, so a link out of it would lead nowhere.
@pytest.mark.parametrize("folder", [*PYTHON, "clients/typescript"])
@pytest.mark.parametrize("name", LICENSE_FILES)
def test_distribution_holds_the_licence(folder: str, name: str) -> None:
    path = ROOT / folder / name
    assert not path.is_symlink()
    assert path.read_bytes() == (ROOT / name).read_bytes()
