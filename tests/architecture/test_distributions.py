"""Every package of the tree belongs to exactly one distribution, which states its licence."""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path, PurePath

import pytest

from targets.neuron import DRIVER_PACKAGE, LIBRARY_PACKAGES, NEURON_PYTHON
from tests.architecture.sources import SERVING
from tests.repository import ROOT, list_tracked

#: Has packages of others and no code.
PINS = "neuron_lowering"
PYTHON = ["protos", *SERVING, "clients/python", PINS]
#: What torch and torch-xla require, or the compiler's virtual environment loads at its start.
BROUGHT_BY_TORCH = {"numpy", "tqdm", "typing_extensions", "setuptools", "sympy", "mpmath", "filelock", "networkx"}
LICENSE_FILES = ["LICENSE", "NOTICE"]
#: What imports write before a file of a distribution, unless it is the folder's name.
IMPORTED_AS: dict[str, tuple[str, ...]] = {"protos": (), "clients/python": (), PINS: ()}
#: Files that no wheel has as part of a package: what builds and describes it, and sources of what is built.
BESIDE_PACKAGES = (
    *("pyproject.toml", "setup.py", "README.md", *LICENSE_FILES),
    "native/*",  # the extension's sources
    *("buf.yaml", "v0.*.binpb"),  # for buf
    "google/*.proto",  # their stubs come from googleapis-common-protos
)


@pytest.mark.parametrize("folder", PYTHON)
def test_every_file_below_a_package_stands_in_the_wheel(folder: str) -> None:
    prefix = PurePath(*IMPORTED_AS.get(folder, (folder,)))
    files = [name.removeprefix(f"{folder}/") for name in list_tracked(folder)]
    wanted = {str(prefix / file) for file in files if not any(fnmatch(file, kind) for kind in BESIDE_PACKAGES)}
    assert wanted - _list_wheel(folder) == set()


def _list_wheel(folder: str) -> set[str]:
    """Files of the distribution's wheel, but for compiled ones and what describes it."""
    script = "setup.py" if (ROOT / folder / "setup.py").exists() else "-cimport setuptools; setuptools.setup()"
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, script, "--quiet", "egg_info", "--egg-base", directory]
        built = Path(directory, "built")
        subprocess.run([*command, "build_py", "--build-lib", built], cwd=ROOT / folder, check=True, capture_output=True)
        return {str(file.relative_to(built)) for file in built.rglob("*") if file.is_file()}


@pytest.mark.parametrize("folder", SERVING)
def test_every_folder_with_modules_is_a_package(folder: str) -> None:
    folders = {module.parent for module in (ROOT / folder).rglob("*.py") if "build" not in module.parts}
    assert [str(found) for found in folders if not (found / "__init__.py").exists()] == []


@pytest.mark.parametrize("folder", SERVING)
def test_package_says_what_it_does(folder: str) -> None:
    for init in (ROOT / folder).rglob("__init__.py"):
        assert init.read_text().startswith('"""'), f"{init.relative_to(ROOT)} has no docstring"


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
    page = (ROOT / "docs/neuron.md").read_text()
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
