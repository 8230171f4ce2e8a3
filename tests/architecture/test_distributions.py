"""Every package of the tree belongs to exactly one distribution, which states its licence."""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from targets.neuron import DRIVER_PACKAGE, LIBRARY_PACKAGES, NEURON_PYTHON
from tests.repository import ROOT

IN_PLACE = ["bundle", "targets", "edge", "execution", "compiler_svc", "runtime_svc"]
#: Has packages of others and no code.
PINS = "neuron_lowering"
PYTHON = ["protos", *IN_PLACE, "clients/python", PINS]
#: What torch and torch-xla require, or the compiler's virtual environment loads at its start.
BROUGHT_BY_TORCH = {"numpy", "tqdm", "typing_extensions", "setuptools", "sympy", "mpmath", "filelock", "networkx"}
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


def test_what_lowers_for_neuron_has_neurons_torch_and_no_other() -> None:
    """The interpreter with Neuron's packages runs the compiler's sources, and needs what these import."""
    project = tomllib.loads((ROOT / PINS / "pyproject.toml").read_text())["project"]
    pinned = dict(one.split("==") for one in project["dependencies"] if "==" in one)
    assert pinned["torch"] == pinned["torch-xla"] == "2.9.0"
    assert dict(NEURON_PYTHON.pins) == pinned, "each version is part of the action digest"
    page = (ROOT / "README.md").read_text()
    packages = (DRIVER_PACKAGE, *LIBRARY_PACKAGES)
    assert [name for name, version in packages if f'"{name}={version}*"' not in page] == []
    assert [name for name, version in NEURON_PYTHON.pins if f"{name} {version}" not in page.replace("\n", " ")] == []
    code = (
        "import importlib, json, sys\n"
        "for name in ('__main__', 'model_builder', 'xla_process', 'xla_model'):\n"
        "    importlib.import_module('compiler_svc.lower.neuron.' + name)\n"
        "importlib.import_module('compiler_svc.trace.named_submodel')\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names)))\n"
    )
    command = [sys.executable, "-c", code]
    loaded = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    owners = metadata.packages_distributions()
    imported = {owner for name in loaded if not name.startswith("_") for owner in owners.get(name, ())}
    own = {name for name in imported if name.startswith("kiln-")}
    named = {re.split(r"[=>]", one)[0] for one in project["dependencies"]}
    assert imported - own - BROUGHT_BY_TORCH <= named
