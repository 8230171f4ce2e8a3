"""Every package of the tree belongs to exactly one distribution."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IN_PLACE = ["bundle", "edge", "execution", "compiler_svc", "runtime_svc"]


@pytest.mark.parametrize("folder", IN_PLACE)
def test_distribution_lists_every_package(folder: str) -> None:
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    found = {".".join(init.parent.relative_to(ROOT).parts) for init in (ROOT / folder).rglob("__init__.py")}
    with_modules = {
        ".".join(module.parent.relative_to(ROOT).parts)
        for module in (ROOT / folder).rglob("*.py")
        if "build" not in module.parts
    }
    assert listed == found == with_modules


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
