"""What is installed has the versions of deploy/constraints.txt, and ranges go as far as the series that was tested."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.architecture.test_distributions import PINS, PYTHON
from tests.repository import ROOT

CONSTRAINTS = ROOT / "deploy/constraints.txt"
#: Not neuron_lowering, which has pins of its own.
OURS = [folder for folder in PYTHON if folder != PINS]
#: They change what they do between minor releases.
UNSTABLE = {"smg", "sqlalchemy", "transformers"}
#: deploy/install-torch has its version.
TORCH = "torch"


def read_constraints() -> dict[str, str]:
    lines = (line.partition("==") for line in CONSTRAINTS.read_text().splitlines())
    return {canonicalize_name(name): version for name, _, version in lines}


def read_requirements(folder: str) -> Iterator[Requirement]:
    """Requirements of a distribution, of its extras and of its build, but for our own distributions."""
    tables = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())
    project = tables["project"]
    extras = project.get("optional-dependencies", {}).values()
    for stated in (
        *tables["build-system"]["requires"],
        *project["dependencies"],
        *(one for extra in extras for one in extra),
    ):
        requirement = Requirement(stated)
        if not requirement.name.startswith("kiln-"):
            yield requirement


def find_bound(name: str, version: Version) -> str:
    """The first release that is not of the same series: the next major one, or minor one before 1.0 and if unstable."""
    if version.major == 0 or name in UNSTABLE:
        return f"{version.major}.{version.minor + 1}"
    return f"{version.major + 1}"


def test_constraints_are_names_and_versions() -> None:
    lines = CONSTRAINTS.read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    assert TORCH not in read_constraints()


@pytest.mark.parametrize("folder", OURS)
def test_ranges_are_the_series_that_was_tested(folder: str) -> None:
    versions = read_constraints()
    for requirement in read_requirements(folder):
        name = canonicalize_name(requirement.name)
        if name == TORCH:
            continue
        bounds = {one.operator: one.version for one in requirement.specifier}
        if bounds.keys() == {">=", "<"}:
            assert bounds["<"] == find_bound(name, Version(bounds[">="])), requirement
        else:
            # The other: the extra vllm-engine of the runtime says which release, and the client's follows.
            assert bounds.keys() <= {"=="}, requirement
        assert requirement.specifier.contains(versions[name]), (
            f"{requirement} and the constraints, which `make lock` renews"
        )


def test_the_groups_ranges_are_in_the_constraints_alone() -> None:
    group = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["dev"]
    versions = read_constraints()
    for requirement in map(Requirement, group):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)])
        assert {one.operator for one in requirement.specifier} <= {"=="}


def test_what_is_installed_here_has_these_versions() -> None:
    versions = read_constraints()
    installed = {canonicalize_name(found.name): found.version for found in metadata.distributions()}
    assert {name: installed[name] for name in versions.keys() & installed.keys()}.items() <= versions.items()
    assert {name for name in _list_required() if name not in versions} == {TORCH}


def _list_required() -> set[str]:
    """What our distributions require, and what that requires."""
    found: set[str] = set()
    wanted = [one for folder in OURS for one in read_requirements(folder)]
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        if name in found:
            continue
        found.add(name)
        try:
            stated = metadata.requires(name) or ()
        except metadata.PackageNotFoundError:
            continue  # of an extra that .venv lacks
        environments = [{"extra": extra} for extra in (*requirement.extras, "")]
        wanted += [
            one
            for one in map(Requirement, stated)
            if one.marker is None or any(one.marker.evaluate(environment) for environment in environments)
        ]
    return found
