"""What the Dockerfiles promise, read without carrying them out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import dockerfile
import pytest

from execution.executors.neuron.library import LIBRARIES
from targets.neuron import LIBRARY_PACKAGES, NEURON_PYTHON
from tests.repository import ROOT

SERVICES = ["compiler", "runtime"]
#: What both copy, in this order.
SHARED = ["deploy/constraints.txt", "deploy/install-torch", "protos", "bundle", "targets", "edge", "execution"]
GATEWAY = "gateway"
#: Each adds to the image of its service.
NEURON = [f"{name}-neuron" for name in SERVICES]
FILES = {name: ROOT / "deploy" / f"{name}.Dockerfile" for name in (*SERVICES, GATEWAY, *NEURON)}


def instructions(name: str) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    return [(command.cmd, command.flags, command.value) for command in dockerfile.parse_file(str(FILES[name]))]


def values(name: str, instruction: str) -> list[tuple[str, ...]]:
    return [value for command, _, value in instructions(name) if command == instruction]


def copied(name: str) -> list[str]:
    """What comes from the sources, not from another stage."""
    return [value[0] for command, flags, value in instructions(name) if command == "COPY" and not flags]


def scripts(name: str) -> list[str]:
    return [value[0] for value in values(name, "RUN")]


def test_no_dockerfile_is_left_out() -> None:
    assert {*(ROOT / "deploy").glob("*Dockerfile*")} == {*FILES.values()}


@pytest.mark.parametrize("name", FILES)
def test_the_linter_has_nothing_to_say(name: str) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    command = [str(hadolint), "--config", str(ROOT / "deploy/hadolint.yaml"), "--format", "json", str(FILES[name])]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert json.loads(result.stdout) == []


def test_both_begin_alike_so_that_torch_is_installed_once() -> None:
    compiler, runtime = (instructions(name) for name in SERVICES)
    shared = [left for left, right in zip(compiler, runtime, strict=False) if left == right]
    assert any("execution" in value for _, _, value in shared)
    assert [value[0] for command, flags, value in shared if command == "COPY" and not flags] == SHARED


def test_the_runtime_is_given_neither_compiler() -> None:
    described = instructions("runtime")
    assert copied("runtime") == [*SHARED, "runtime_svc"]
    last_stage = max(index for index, (command, _, _) in enumerate(described) if command == "FROM")
    assert not [value for command, _, value in described[last_stage:] if command == "RUN" and "g++" in value[0]]
    assert [value for command, _, value in instructions("compiler")[last_stage:] if "g++" in value[0]]


@pytest.mark.parametrize(("name", "num_installs"), [*((name, 3) for name in SERVICES), (GATEWAY, 1)])
def test_every_package_has_the_version_of_the_constraints(name: str, num_installs: int) -> None:
    installing = [script for script in scripts(name) if "pip install" in script or "install-torch" in script]
    assert len(installing) == num_installs
    assert [script for script in installing if "--constraint /src/constraints.txt" not in script] == []
    assert [script for script in scripts(name) if "pip wheel" in script and "--no-build-isolation" not in script] == []


@pytest.mark.parametrize("name", [*SERVICES, GATEWAY])
def test_the_image_runs_this_python_as_an_ordinary_user(name: str) -> None:
    (image,) = (value for (value, *_) in values(name, "ARG") if value.startswith("PYTHON_IMAGE="))
    assert image.startswith(f"PYTHON_IMAGE=python:{sys.version_info.major}.{sys.version_info.minor}-")
    assert values(name, "USER") == [("10001:10001",)]


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_for_neuron_adds_to_that_of_its_service(service: str) -> None:
    """Its entrypoint, its environment, its ports and its user stay."""
    name = f"{service}-neuron"
    assert values(name, "ARG")[0] == (f"{service.upper()}_IMAGE=kiln-{service}",)
    assert values(name, "FROM") == [(f"${{{service.upper()}_IMAGE}}",)]
    assert values(name, "USER") == [("0",), ("10001:10001",)]
    assert {command for command, _, _ in instructions(name)} <= {"ARG", "FROM", "USER", "ADD", "COPY", "RUN", "ENV"}
    assert not [script for script in scripts(name) if "/opt/kiln/" in script]


def test_neurons_packages_have_an_environment_of_their_own() -> None:
    ((name, value),) = values("compiler-neuron", "ENV")
    assert name == NEURON_PYTHON.variable
    (installed,) = (script for script in scripts("compiler-neuron") if " install " in script)
    assert installed.startswith(f"{value} -m pip install")
    assert installed.endswith(" --extra-index-url ${NEURON_INDEX} /src/neuron_lowering")
    assert ("neuron_lowering", "/src/neuron_lowering") in values("compiler-neuron", "COPY")


def test_the_runtimes_packages_have_the_versions_of_the_target_and_its_library_is_where_ranks_look_for_it() -> None:
    assert scripts("runtime-neuron")[-1] == f"ls {LIBRARIES[1]}"
    defaults = dict(value[0].split("=", 1) for value in values("runtime-neuron", "ARG"))
    (installed,) = (script for script in scripts("runtime-neuron") if "apt-get install" in script)
    for name, value in defaults.items():
        installed = installed.replace(f"${{{name}}}", value)
    assert all(f'"{name}={version}*"' in installed for name, version in LIBRARY_PACKAGES)
