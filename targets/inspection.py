"""`python -m targets.inspection TARGET`: whether this host has the tools that make a target's executables."""

from __future__ import annotations

import platform
import subprocess
import sys
from typing import Final

from bundle.errors import KilnError
from targets.errors import IsaUnsupported, NeuronToolchainMissing, ToolchainMissing
from targets.finding import Finding, print_finding
from targets.isa import NATIVE
from targets.neuron_releases import NEEDED_GLIBC, list_faults
from targets.registry import TARGETS
from targets.target import Target
from targets.toolchain import Interpreter

#: The level whose tools are inspected: the one of compiles that name none.
_LEVEL: Final = 1
_PACKAGE_INDEX: Final = "https://pip.repos.neuron.amazonaws.com"
#: Has torch without the libraries of CUDA.
_TORCH_INDEX: Final = "https://download.pytorch.org/whl/cpu"
_ENVIRONMENT: Final = ".venv-neuron"


def inspect_tools(target: Target) -> Finding:
    """Looks for the programs and distributions that lowering calls."""
    toolchain = target.lowerings[_LEVEL].toolchain
    if toolchain.interpreter is not None:
        return inspect_interpreter(toolchain.interpreter, target)
    try:
        isa = target.isas.resolve(NATIVE)
        versions = toolchain.read_versions()
    except ToolchainMissing as error:
        compiler = error.metadata["compiler"]
        return Finding(ok=False, summary=f"no {compiler} on PATH", advice=f"sudo apt-get install --yes {compiler}")
    except IsaUnsupported as error:
        accepted = ", ".join(target.isas.names)
        advice = f"use a host whose processor has one of {accepted}"
        return Finding(ok=False, summary=str(error), advice=advice)
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Finding(ok=True, summary=f"{listed}; this processor has {isa}", details={"versions": versions, "isa": isa})


def inspect_interpreter(interpreter: Interpreter, target: Target) -> Finding:
    """Compares the packages of the other interpreter with the versions that Kiln was written for, and imports them."""
    libc = _read_libc()
    if libc is not None and libc < NEEDED_GLIBC:
        summary = f"glibc {_show(libc)}, needed {_show(NEEDED_GLIBC)}: torch-neuronx cannot be imported"
        return Finding(ok=False, summary=summary, advice="use Ubuntu 24.04, or a container of the compiler's image")
    path = interpreter.find()
    try:
        found = interpreter.list_versions()
    except NeuronToolchainMissing:
        advice = f"set {interpreter.variable} to a Python 3.11 to 3.13, or give it as --neuron-python"
        return Finding(ok=False, summary=f"{path} does not start", advice=advice)
    details = {"interpreter": path, "versions": dict(found), "pins": dict(interpreter.pins)}
    missing = [name for name, _ in interpreter.pins if found[name] is None]
    faults = [f"it lacks {', '.join(missing)}"] if missing else []
    # A build of torch for the CPU alone has a suffix.
    faults += [
        "; ".join([f"{name} {held}, needed {version}", *list_faults(name, held)])
        for name, version in interpreter.pins
        if (held := found[name]) is not None and held.partition("+")[0] != version
    ]
    if not faults and (complaint := _try_import(interpreter, target)):
        faults = [f"{interpreter.entry_module} cannot be imported: {complaint}"]
    if not faults:
        return Finding(
            ok=True, summary=f"{len(interpreter.pins)} packages at their versions in {path}", details=details
        )
    advice = _install(path)
    if path == sys.executable:
        # Its torch is another one, which the compiler needs.
        other = f"{_ENVIRONMENT}/bin/python"
        advice = f"python3.11 -m venv {_ENVIRONMENT} && {_install(other)} && export {interpreter.variable}=$PWD/{other}"
    return Finding(ok=False, summary=f"{path}: {'; '.join(faults)}", advice=advice, details=details)


def _try_import(interpreter: Interpreter, target: Target) -> str:
    """Imports what makes executables as a host without a device does; returns the last line of what went wrong."""
    if not interpreter.entry_module:
        return ""
    ended = subprocess.run(
        [interpreter.find(), "-c", f"import {interpreter.entry_module}"],
        env=interpreter.make_environment() | {"NEURON_PLATFORM_TARGET_OVERRIDE": target.kind},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode == 0:
        return ""
    return next(reversed(ended.stderr.strip().splitlines()), f"exit code {ended.returncode}")


def _install(python: str) -> str:
    indexes = " ".join(f"--extra-index-url {index}" for index in (_PACKAGE_INDEX, _TORCH_INDEX))
    return f"{python} -m pip install {indexes} ./neuron_lowering"


def _read_libc() -> tuple[int, ...] | None:
    """Reads the version of glibc; None where there is another library."""
    name, version = platform.libc_ver()
    return tuple(int(part) for part in version.split(".")) if name == "glibc" else None


def _show(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def main(kind: str) -> None:
    """Prints the finding."""
    target = next((one for one in TARGETS.values() if one.kind == kind), None)
    if target is None:
        sys.exit(f"target: got {kind!r}; accepted: {', '.join(TARGETS)}")
    try:
        print_finding(inspect_tools(target))
    except KilnError as error:
        print_finding(Finding(ok=False, summary=str(error), advice="repair what the message names"))


if __name__ == "__main__":
    main(sys.argv[1])
